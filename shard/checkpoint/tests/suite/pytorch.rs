//! An export with PyTorch's names is imported by any layout, bit for bit.

use crate::common::{Gradients, PRECISIONS, Run, STAGES, WhichRule, cases};
use crate::layouts::train;
use crate::whole::{Whole, join, part};
use meshstep_checkpoint::pytorch::{Import, PyTorchFile};
use meshstep_checkpoint::{self as checkpoint, Disk};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::loopback::spawn;
use meshstep_optim::AdamW;
use meshstep_shard::{Optimizer, Options, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Slice, SliceMut};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

pub(crate) const DIR: &str = "/run";
pub(crate) const FILE: &str = "/run/model.safetensors";

const RULES: [WhichRule; 6] = [
    WhichRule::AdamW,
    WhichRule::SgdMomentum,
    WhichRule::Adam,
    WhichRule::AmsGrad,
    WhichRule::RmsProp,
    WhichRule::Adagrad,
];

pub(crate) fn on(sim: &Sim) -> PyTorchFile {
    PyTorchFile::on(Arc::new(sim.clone()), FILE)
}

/// Joins the parts of all ranks, without counts of updates that PyTorch does not keep.
fn comparable(parts: Vec<Whole>, run: &Run) -> Whole {
    let mut whole = join(parts);
    if run.rule == WhichRule::SgdMomentum {
        whole.tensors.values_mut().for_each(|(t, _)| *t = 0);
        whole.steps = 0;
    }
    whole
}

fn with(run: &Run, (ranks, stage, bucket): (usize, usize, usize)) -> Run {
    let options = Options { bucket_len: Some(bucket), ..run.options.clone() };
    Run { ranks, options, ..run.clone() }.stage(STAGES[stage])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(40, 2000), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_exported_is_imported_by_any_layout(
        from in (1..6usize, 0..STAGES.len(), 1..300usize),
        to in (1..6usize, 0..STAGES.len(), 1..300usize),
        lens in prop::collection::vec(prop_oneof![Just(0), Just(1), 0..160usize], 1..8),
        (precision, rule) in (0..PRECISIONS.len(), 0..RULES.len()),
        (before, strayed) in (0..4u64, 0..3u64),
        seed in any::<u64>(),
    ) {
        prop_assume!(lens.iter().any(|&len| len > 0));
        let (dtype, precision) = PRECISIONS[precision];
        let rule = RULES[rule];
        let remainder = format!("{precision:?}").contains("Remainder");
        let stochastic = format!("{precision:?}").contains("Stochastic");
        // The rule's random bits depend on the count of updates, which PyTorch does not keep.
        prop_assume!(!(remainder || stochastic && rule == WhichRule::SgdMomentum));
        let grads = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let options = Options { precision, ..Options::default() };
        let run = Run { lens, dtype, grads, options, gradients: Gradients::Equal, rule, seed, ..Run::default() };
        let sim = Sim::new(DIR);
        let saves = with(&run, from);
        let ends = spawn(saves.ranks, |comm| {
            let last = saves.ranks - 1;
            let mut opt = saves.build(comm).unwrap();
            train(&saves, &mut opt, 1..before + 1);
            checkpoint::export_pytorch(&mut opt, &on(&sim), last).unwrap();
            let then = part(&opt);
            train(&saves, &mut opt, before + 1..before + 4);
            (then, part(&opt))
        });
        let (then, end): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
        let loads = with(&run, to);
        let ends = spawn(loads.ranks, |comm| {
            let mut opt = loads.build(comm).unwrap();
            train(&loads, &mut opt, 1..strayed + 1);
            let import = Import { fresh: before == 0, steps: Some(before) };
            let imported = checkpoint::import_pytorch(&mut opt, &on(&sim), import).unwrap();
            assert_eq!(imported.steps, before);
            assert_eq!(imported.fresh.len(), if before == 0 { loads.lens.len() } else { 0 });
            let then = part(&opt);
            train(&loads, &mut opt, before + 1..before + 4);
            (then, part(&opt))
        });
        let (loaded, went_on): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
        let (then, loaded) = (comparable(then, &saves), comparable(loaded, &loads));
        prop_assert!(loaded == then, "what was taken in is not what was written");
        let (end, went_on) = (comparable(end, &saves), comparable(went_on, &loads));
        prop_assert!(went_on == end, "three steps later they are apart");
    }
}

/// Reads a file with another reader: keys, types, shapes and values.
pub(crate) fn read(sim: &Sim) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let file = sim.open(Path::new(FILE)).unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(0, &mut bytes).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    assert_eq!(header["__metadata__"], serde_json::json!({ "format": "pt" }));
    let vector = |(key, entry): (String, serde_json::Value)| {
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        let offsets: Vec<usize> =
            entry["data_offsets"].as_array().unwrap().iter().map(|at| number(at) as usize).collect();
        let shape = entry["shape"].as_array().unwrap().iter().map(number).collect();
        let data = bytes[8 + len + offsets[0]..8 + len + offsets[1]].to_vec();
        (key, (entry["dtype"].as_str().unwrap().to_owned(), shape, data))
    };
    header.into_iter().filter(|(key, _)| key != "__metadata__").map(vector).collect()
}

#[test]
fn keys_types_and_values_are_pytorch_s() {
    let slots = |rule| match rule {
        WhichRule::AmsGrad => vec!["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"],
        WhichRule::SgdMomentum => vec!["momentum_buffer"],
        WhichRule::RmsProp => vec!["grad_avg", "momentum_buffer", "square_avg", "step"],
        WhichRule::Adagrad => vec!["step", "sum"],
        WhichRule::Sgd => vec![],
        _ => vec!["exp_avg", "exp_avg_sq", "step"],
    };
    for rule in RULES.into_iter().chain([WhichRule::Sgd]) {
        let (sim, run) = (Sim::new(DIR), Run { ranks: 2, rule, ..Run::default() }.stage(Stage::Zero2));
        let parts = spawn(2, |comm| {
            let mut opt = run.build(comm).unwrap();
            train(&run, &mut opt, 1..3);
            checkpoint::export_pytorch(&mut opt, &on(&sim), 0).unwrap();
            part(&opt)
        });
        let (whole, file) = (join(parts.unwrap()), read(&sim));
        assert_eq!(file.len(), run.lens.len() * (1 + slots(rule).len()), "{rule:?}");
        for (i, &len) in run.lens.iter().enumerate() {
            let name = crate::common::name(i);
            let bytes = |slot: &str| -> Vec<u8> {
                let vector = whole.tensors[&name].1.get(slot);
                vector.map_or(Vec::new(), |bytes| bytes.whole().unwrap().to_vec())
            };
            assert_eq!(file[&name], ("F32".to_owned(), vec![len as u64], bytes("whole")));
            for slot in slots(rule) {
                let (dtype, shape, values) = &file[&format!("state.{name}.{slot}")];
                let own = match slot {
                    "exp_avg" => "m",
                    "exp_avg_sq" => "v",
                    "max_exp_avg_sq" => "vmax",
                    "momentum_buffer" => "momentum",
                    same => same,
                };
                let (expected, of) = match slot {
                    "step" => (2f32.to_le_bytes().to_vec(), vec![]),
                    _ => (bytes(own), vec![len as u64]),
                };
                assert_eq!((&**dtype, shape, values), ("F32", &of, &expected), "{name}.{slot}");
            }
        }
    }
}

/// f32 masters replace 16-bit parameters, and bf16 moments are widened to f32.
#[test]
fn a_parameter_is_in_the_widest_of_its_types() {
    for (precision, dtype) in
        PRECISIONS.into_iter().zip(["F32", "F64", "F32", "F32", "", "F32", "F32", "BF16", "F32", ""])
    {
        let (param, precision) = precision;
        let grads = if param == DType::F64 { DType::F64 } else { DType::F32 };
        let options = Options { precision, ..Options::default() };
        let (sim, run) = (Sim::new(DIR), Run { ranks: 2, dtype: param, grads, options, ..Run::default() });
        let written = spawn(2, |comm| {
            let mut opt = run.build(comm).unwrap();
            train(&run, &mut opt, 1..2);
            checkpoint::export_pytorch(&mut opt, &on(&sim), 0).map_err(|error| error.to_string())
        });
        for written in written.unwrap() {
            match dtype {
                "" => assert!(written.unwrap_err().contains("the master of \"p0\" is a 16-bit remainder")),
                _ => written.unwrap(),
            }
        }
        if !dtype.is_empty() {
            let file = read(&sim);
            let vectors = file.iter().filter(|(key, _)| !key.ends_with(".step"));
            assert!(vectors.clone().all(|(_, (of, ..))| of == dtype), "{precision:?} {file:?}");
            assert_eq!(vectors.count(), 3 * run.lens.len());
        }
    }
}

/// Frozen parameters have no state, and scalars have no dimensions; groups count updates together.
#[test]
fn frozen_parameters_and_scalars_travel_too() {
    let make = |comm, stage, first: f32| {
        let layout = Layout::builder().param("scale", &[], DType::F32).frozen("table", &[5, 7], DType::BF16);
        let layout = layout.param("w", &[3, 11], DType::F32).frozen("none", &[0, 3], DType::F32);
        let fill = |p: &meshstep_tensor::Param, mut values: SliceMut<'_>| {
            let own: Vec<f32> = (0..p.len()).map(|i| first + i as f32).collect();
            values.cast_from(Slice::from(&own[..]))
        };
        let options = Options { stage, ..Options::default() };
        Optimizer::new(comm, layout.build().unwrap(), AdamW::default(), fill, options).unwrap()
    };
    let step = |opt: &mut Optimizer| {
        let batch = opt.micro_batch(1).unwrap();
        batch.grad("scale", &[0.5f32][..]).unwrap();
        batch.grad("w", &[0.25f32; 33][..]).unwrap();
        batch.finish().unwrap();
        opt.step(StepArgs { lr: 0.1, ..StepArgs::default() }).unwrap().outcome().unwrap();
    };
    let sim = Sim::new(DIR);
    let saved = spawn(3, |comm| {
        let mut opt = make(comm, Stage::Zero2, 1.0);
        step(&mut opt);
        checkpoint::export_pytorch(&mut opt, &on(&sim), 2).unwrap();
        part(&opt)
    });
    let file = read(&sim);
    let described: Vec<_> =
        file.iter().map(|(key, (dtype, shape, _))| (&**key, &**dtype, &**shape)).collect();
    let expected: [(&str, &str, &[u64]); 10] = [
        ("none", "F32", &[0, 3]),
        ("scale", "F32", &[]),
        ("state.scale.exp_avg", "F32", &[]),
        ("state.scale.exp_avg_sq", "F32", &[]),
        ("state.scale.step", "F32", &[]),
        ("state.w.exp_avg", "F32", &[3, 11]),
        ("state.w.exp_avg_sq", "F32", &[3, 11]),
        ("state.w.step", "F32", &[]),
        ("table", "BF16", &[5, 7]),
        ("w", "F32", &[3, 11]),
    ];
    assert_eq!(described, expected);
    let loaded = spawn(2, |comm| {
        let mut opt = make(comm, Stage::Zero1, 9.0);
        assert_eq!(checkpoint::import_pytorch(&mut opt, &on(&sim), Import::default()).unwrap().steps, 1);
        part(&opt)
    });
    assert!(join(loaded.unwrap()) == join(saved.unwrap()));
}
