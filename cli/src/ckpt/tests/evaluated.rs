//! `export` of a run with a schedule-free rule: the values of `begin_evaluation`, in every precision, from any ranks.

use std::fs;
use std::sync::Arc;

use meshstep_checkpoint::{Save, Store, save};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{Rounding, ScheduleFreeAdamW};
use meshstep_parallel3d::{Axis, Mesh, Model, Optimizer as MeshOptimizer, Placement};
use meshstep_shard::{Groups, Master, Moments, Optimizer, Options, Precision, Stage, Step, StepArgs};
use meshstep_tensor::{DType, Layout, Param, SliceMut, cast};
use safetensors::SafeTensors;

use super::{ckpt, text};

const PARAMS: [(&str, &[usize]); 3] = [("w", &[40, 7]), ("b", &[129]), ("other", &[6])];

/// Schedule-free AdamW, with another weight of the average for one tensor.
fn rules() -> Groups {
    let rule = ScheduleFreeAdamW { beta1: 0.8, ..ScheduleFreeAdamW::default() };
    Groups::new(rule.clone()).with(ScheduleFreeAdamW { beta1: 0.95, ..rule }, ["other"])
}

/// Returns the bytes of each parameter.
fn bytes(opt: &Optimizer) -> Vec<Vec<u8>> {
    PARAMS.map(|(name, _)| opt.param(name).unwrap().bytes().unwrap().to_vec()).into()
}

/// Trains three steps, saves, and returns the parameters where they are trained and where they are evaluated.
fn train(
    comm: Arc<dyn Communicator>,
    (dtype, precision, stage): (DType, Precision, Stage),
    store: &Store,
) -> [Vec<Vec<u8>>; 2] {
    let mut layout = Layout::builder();
    for (name, shape) in PARAMS {
        layout = layout.param(name, shape, dtype);
    }
    let values = |len: usize, of: usize| -> Vec<f32> {
        (0..len).map(|i| ((i * 31 + of * 17) % 97) as f32 / 61.0 - 0.7).collect()
    };
    let first = |p: &Param, out: SliceMut<'_>| cast((&values(p.len(), 1)).into(), out);
    let options = Options { stage, precision, ..Options::default() };
    let mut opt = Optimizer::new(comm, layout.build().unwrap(), rules(), first, options).unwrap();
    for step in 0..3 {
        let mb = opt.micro_batch(1).unwrap();
        for (name, shape) in PARAMS {
            let mut slot = mb.slot(name).unwrap();
            cast((&values(shape.iter().product(), step + 2)).into(), slot.as_mut().unwrap()).unwrap();
            slot.fill().unwrap();
        }
        mb.finish().unwrap();
        opt.step(StepArgs { lr: 0.05, ..StepArgs::default() }).unwrap().outcome().unwrap();
    }
    save(&mut opt, store, Save::default()).unwrap();
    let trained = bytes(&opt);
    opt.begin_evaluation().unwrap();
    [trained, bytes(&opt)]
}

#[test]
fn exports_are_the_values_of_an_evaluation() {
    let plain = Precision::default();
    let stochastic = Precision { rounding: Rounding::Stochastic, seed: 11, ..plain };
    let narrow = Precision { moments: Moments::BF16, ..stochastic };
    let recipes = [
        (DType::F32, plain),
        (DType::F64, plain),
        (DType::BF16, Precision { master: Master::F32, ..plain }),
        (DType::F16, Precision { master: Master::F32, ..plain }),
        (DType::BF16, Precision { master: Master::Remainder, ..plain }),
        (DType::BF16, stochastic),
        (DType::F32, narrow),
        (DType::BF16, Precision { master: Master::Remainder, ..narrow }),
    ];
    for (i, (dtype, precision)) in recipes.into_iter().enumerate() {
        let stage = [Stage::Zero2, Stage::Replicated, Stage::Zero1][i % 3];
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let ranks = loopback::spawn(3, |comm| train(comm, (dtype, precision, stage), &store)).unwrap();
        let [trained, evaluated] = &ranks[0];
        assert!(trained.iter().zip(evaluated).all(|(trained, evaluated)| trained != evaluated));
        let to = dir.path().join("model.safetensors");
        let export = ["export", text(dir.path()), "--to", text(&to)];
        let (said, _) = ckpt(&export).unwrap();
        assert!(said.contains("3 vectors") && said.contains("3 of them at the average"), "{said}");
        assert_eq!(&exported(&to), evaluated, "{dtype:?} {precision:?} at {stage:?}");
        let (said, _) = ckpt(&[&export[..], &["--state", "--force"]].concat()).unwrap();
        assert!(!said.contains("average"), "{said}");
        assert_eq!(&exported(&to), trained);
    }
}

fn exported(file: &std::path::Path) -> Vec<Vec<u8>> {
    let bytes = fs::read(file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    PARAMS.map(|(name, _)| file.tensor(name).unwrap().data().to_vec()).into()
}

/// Columns of a matrix lie on two ranks: the file has them in their places.
#[test]
fn cut_tensors_are_exported_whole() {
    let model = Model::builder()
        .param("w", &[5, 6], DType::BF16, Placement::whole().cut(Axis::Tp, 1))
        .build()
        .unwrap();
    let mesh: Mesh = "tp=2,dp=2".parse().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let ranks = loopback::spawn(4, |world| {
        let precision = Precision { rounding: Rounding::Stochastic, seed: 3, ..Precision::default() };
        let options = Options { stage: Stage::Zero1, precision, ..Options::default() };
        let rule = ScheduleFreeAdamW::default();
        let tp = mesh.coordinate(world.rank()).unwrap().along(Axis::Tp);
        let values = |by: f32| (0..15).map(|i| (i + 15 * tp) as f32 / by - 1.0).collect::<Vec<f32>>();
        let first = |_: &_, _: &[_], out: SliceMut<'_>| cast((&values(7.0)).into(), out);
        let mut opt = MeshOptimizer::new(world, mesh.clone(), &model, rule, first, options).unwrap();
        for _ in 0..2 {
            let mb = opt.micro_batch(1).unwrap();
            let mut slot = mb.slot("w").unwrap();
            cast((&values(9.0)).into(), slot.as_mut().unwrap()).unwrap();
            slot.fill().unwrap();
            mb.finish().unwrap();
            opt.step(StepArgs { lr: 0.05, ..StepArgs::default() }).unwrap().outcome().unwrap();
        }
        save(&mut opt, &store, Save::default()).unwrap();
        opt.begin_evaluation().unwrap();
        (tp, opt.optimizer().param("w").unwrap().bytes().unwrap().to_vec())
    });
    let to = dir.path().join("model.safetensors");
    ckpt(&["export", text(dir.path()), "--to", text(&to)]).unwrap();
    let bytes = fs::read(&to).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let whole = file.tensor("w").unwrap();
    for (tp, own) in ranks.unwrap() {
        let row = |row: usize| &whole.data()[(row * 6 + 3 * tp) * 2..(row * 6 + 3 * tp + 3) * 2];
        assert_eq!((0..5).map(row).collect::<Vec<_>>().concat(), own);
    }
}
