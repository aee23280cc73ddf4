//! Random meshes, stages and recipes: a load restores the saved bits, and training continues as if uninterrupted.

use crate::common::{STAGES, adamw, build, held_at, model, take_step};
use meshstep_cases::{long, tried};
use meshstep_checkpoint::pytorch::{Import, PyTorchFile};
use meshstep_checkpoint::{self as checkpoint, Load, Save, Saver, Store};
use meshstep_comm::{Kind, loopback};
use meshstep_optim::{AdamW, Sgd};
use meshstep_parallel3d::{
    Axis, Gradient, Mesh, Model, ModelBuilder, Optimizer, Parameter, Piece, Placement,
};
use meshstep_shard::{Groups, Master, Options, Precision, Stage, Step};
use meshstep_tensor::{DType, Meter, Slice, SliceMut};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;

/// Each vector of each parameter: index in the whole and bits of each element. Joined vectors are sorted by index.
type Whole = BTreeMap<(String, String), Vec<(usize, u64)>>;

fn bits(values: Slice<'_>) -> Vec<u64> {
    let element = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |bits, &byte| bits << 8 | u64::from(byte));
    values.bytes().unwrap().chunks(values.dtype().size()).map(element).collect()
}

/// Returns this rank's part.
fn part(opt: &Optimizer, model: &Model) -> Whole {
    let mut whole = Whole::new();
    for parameter in model.parameters() {
        let held = held_at(parameter, opt.mesh(), opt.coordinate());
        let state = opt.state(&parameter.name).unwrap();
        let mut add = |name: &str, values: Slice<'_>, held: &[usize]| {
            let own = held.iter().copied().zip(bits(values)).collect();
            whole.insert((parameter.name.clone(), name.to_owned()), own);
        };
        let owned = &held[state.range.clone()];
        add("param", state.values, owned);
        state.master.into_iter().for_each(|master| add("master", master, owned));
        state.slots.into_iter().for_each(|(name, values)| add(name, values, owned));
        let unit = opt.gather(opt.optimizer().unit_of(&parameter.name).unwrap().unwrap()).unwrap();
        add("whole", unit.param(&parameter.name).unwrap(), &held);
        whole.insert(
            (parameter.name.clone(), "t".to_owned()),
            vec![(0, state.t), (1, opt.optimizer().steps())],
        );
    }
    whole
}

fn join(parts: impl IntoIterator<Item = Whole>, model: &Model) -> Whole {
    let mut all = Whole::new();
    for (key, own) in parts.into_iter().flatten() {
        all.entry(key).or_default().extend(own);
    }
    for ((name, slot), whole) in &mut all {
        whole.sort_unstable();
        whole.dedup();
        assert!(whole.is_sorted_by(|a, b| a.0 < b.0), "{name}:{slot} parts");
        let len: usize = model.get(name).unwrap().shape.iter().product();
        assert!(slot == "t" || whole.len() == len, "{name}:{slot} is whole");
    }
    all
}

/// Number of steps after the load.
fn after() -> usize {
    if long() { 3 } else { 2 }
}

/// Takes steps up to `before` and saves, or loads that checkpoint. Returns the state at that point and the state a few steps later.
fn run(
    model: &Model,
    mesh: &str,
    options: &Options,
    before: usize,
    then: impl Fn(&mut Optimizer) + Sync,
    begin: usize,
) -> (Whole, Whole) {
    let mesh: Mesh = mesh.parse().unwrap();
    let ends = loopback::spawn(mesh.world_size(), |world| {
        let mut opt = build(world, model, &mesh, (&adamw(), options));
        (0..begin).for_each(|step| _ = take_step(&mut opt, model, step));
        then(&mut opt);
        let here = part(&opt, model);
        (before..before + after()).for_each(|step| _ = take_step(&mut opt, model, step));
        (here, part(&opt, model))
    });
    let (here, end): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
    (join(here, model), join(end, model))
}

/// Same as [`run`], but moves the state from one mesh to another without a file. The ranks of the new mesh start at rank `first` of the
/// old one or after its last.
fn moved(
    model: &Model,
    meshes: [&str; 2],
    options: &[Options; 2],
    first: usize,
    (before, strayed): (usize, usize),
) -> (Whole, Whole) {
    let meshes: [Mesh; 2] = meshes.map(|mesh| mesh.parse().unwrap());
    let first = first.min(meshes[0].world_size());
    let (old, new) = (0..meshes[0].world_size(), first..first + meshes[1].world_size());
    let ends = loopback::spawn(old.end.max(new.end), |via| {
        let among = |ranks: &Range<usize>| via.split(ranks.contains(&via.rank()).then_some(0), 0).unwrap();
        let (old, new) = (among(&old), among(&new));
        let mut old = old.map(|world| build(world, model, &meshes[0], (&adamw(), &options[0])));
        old.iter_mut().for_each(|opt| (0..before).for_each(|step| _ = take_step(opt, model, step)));
        let mut new = new.map(|world| build(world, model, &meshes[1], (&adamw(), &options[1])));
        new.iter_mut().for_each(|opt| (0..strayed).for_each(|step| _ = take_step(opt, model, step)));
        let moved = checkpoint::reshard(&via, old.as_mut(), new.as_mut()).unwrap();
        assert_eq!(via.stats().of(Kind::Send).bytes, moved.sent);
        new.map(|mut opt| {
            let here = part(&opt, model);
            (before..before + after()).for_each(|step| _ = take_step(&mut opt, model, step));
            (here, part(&opt, model))
        })
    });
    let (here, end): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().flatten().unzip();
    (join(here, model), join(end, model))
}

fn mesh() -> impl Strategy<Value = String> {
    let degree = || prop_oneof![Just(1usize), Just(2), Just(4), Just(8)];
    let any = (degree(), degree(), degree(), degree(), any::<bool>());
    any.prop_filter_map("at most 8 ranks", |(tp, cp, replicate, shard, whole)| {
        let fits = tp * cp * replicate * shard <= 8;
        let dp = if whole {
            format!("dp={}", replicate * shard)
        } else {
            format!("dp_replicate={replicate},dp_shard={shard}")
        };
        fits.then(|| format!("tp={tp},cp={cp},{dp}"))
    })
}

const RECIPES: [(DType, Master); 3] =
    [(DType::F32, Master::None), (DType::BF16, Master::F32), (DType::BF16, Master::Remainder)];

proptest! {
    #![proptest_config(ProptestConfig { cases: meshstep_cases::cases(12, 1000), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_mesh_loads_onto_any_other(
        meshes in (mesh(), mesh()),
        stages in (0..STAGES.len(), 0..STAGES.len()),
        buckets in (1..80usize, 1..80usize),
        recipe in 0..RECIPES.len(),
        (before, strayed) in (0..3usize, 0..2usize),
        background in any::<bool>(),
        first in 0..8usize,
    ) {
        let (dtype, master) = RECIPES[recipe];
        let precision = Precision { master, ..Precision::default() };
        let options = |stage: usize, bucket| Options {
            stage: STAGES[stage],
            bucket_len: Some(bucket),
            grads: Some(DType::F32),
            precision,
            ..Options::default()
        };
        let dir = tempfile::tempdir().unwrap();
        let (store, model) = (Store::new(dir.path()), model(dtype));
        let save = |opt: &mut Optimizer| {
            let saved = match background {
                true => checkpoint::save_async(opt, &mut Saver::default(), &store, Save::default()).unwrap().join(),
                false => checkpoint::save(opt, &store, Save::default()),
            };
            assert_eq!(saved.unwrap(), before as u64);
        };
        let (saved, end) = run(&model, &meshes.0, &options(stages.0, buckets.0), before, save, before);
        let load = |opt: &mut Optimizer| drop(checkpoint::load(opt, &store, Load::default()).unwrap());
        let (loaded, went_on) = run(&model, &meshes.1, &options(stages.1, buckets.1), before, load, strayed);
        prop_assert!(loaded == saved, "what was loaded is not what was saved");
        prop_assert!(went_on == end, "three steps later they are apart");
        let options = [options(stages.0, buckets.0), options(stages.1, buckets.1)];
        let (moved, went_on) = moved(&model, [&meshes.0, &meshes.1], &options, first, (before, strayed));
        prop_assert!(moved == saved, "what has come is not what was there");
        prop_assert!(went_on == end, "three steps later they are apart");
    }

    #[test]
    fn what_one_mesh_exports_is_whole_and_any_other_imports_it(
        meshes in (mesh(), mesh()),
        stages in (0..STAGES.len(), 0..STAGES.len()),
        buckets in (1..80usize, 1..80usize),
        recipe in 0..2usize,
        (before, strayed) in (1..3usize, 0..2usize),
    ) {
        let (dtype, master) = RECIPES[recipe];
        let precision = Precision { master, ..Precision::default() };
        let options = |stage: usize, bucket| Options {
            stage: STAGES[stage],
            bucket_len: Some(bucket),
            grads: Some(DType::F32),
            precision,
            ..Options::default()
        };
        let dir = tempfile::tempdir().unwrap();
        let (file, model) = (PyTorchFile::new(dir.path().join("model.safetensors")), model(dtype));
        let seen = Mutex::new(Whole::new());
        let export = |opt: &mut Optimizer| {
            let last = opt.mesh().world_size() - 1;
            checkpoint::export_pytorch(opt, &file, last).unwrap();
            let bytes = checkpoint::serialize(opt).unwrap();
            checkpoint::deserialize(opt, &bytes).unwrap();
            let mut whole = Whole::new();
            checkpoint::consolidate(opt, last, &mut |window| {
                let of = whole.entry((window.param.to_owned(), window.slot.to_owned())).or_default();
                of.extend((window.at as usize..).zip(bits(window.values)));
                Ok(())
            })
            .unwrap();
            whole.values_mut().for_each(|elements| elements.sort_unstable());
            seen.lock().unwrap().extend(whole);
        };
        let (saved, end) = run(&model, &meshes.0, &options(stages.0, buckets.0), before, export, before);
        let shown = saved.iter().filter(|((_, slot), _)| !["whole", "t"].contains(&&**slot));
        let shown: Whole = shown.map(|(key, whole)| (key.clone(), whole.clone())).collect();
        prop_assert!(seen.into_inner().unwrap() == shown, "what one rank got is not what there is");
        let import = |opt: &mut Optimizer| {
            let imported = checkpoint::import_pytorch(opt, &file, Import::default()).unwrap();
            assert_eq!(imported.steps, before as u64);
        };
        let (loaded, went_on) = run(&model, &meshes.1, &options(stages.1, buckets.1), before, import, strayed);
        prop_assert!(loaded == saved, "what was taken in is not what was written");
        prop_assert!(went_on == end, "three steps later they are apart");
    }
}

/// Returns a model in which the table has one name, the other one, or both as two parameters.
fn named(names: &[&str], tied: Option<(&str, &str)>) -> Model {
    let add = |model: ModelBuilder, name: &&str| {
        model.param(*name, &[16, 3], DType::F32, Placement::whole().cut(Axis::Tp, 0))
    };
    let ln = Placement::whole().gradient(Gradient::PartialSum);
    let model = names.iter().fold(Model::builder().param("ln", &[7], DType::F32, ln), add);
    tied.into_iter().fold(model, |model, (name, to)| model.tied(name, to, &[16, 3])).build().unwrap()
}

#[test]
fn a_tied_parameter_is_saved_once_and_found_by_either_name() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    let on = |model: &Model, mesh: &str, then: &(dyn Fn(&mut Optimizer) + Sync)| {
        let mesh: Mesh = mesh.parse().unwrap();
        let ends = loopback::spawn(mesh.world_size(), |world| {
            let mut opt = build(world, model, &mesh, (&adamw(), &Options::default()));
            then(&mut opt);
            part(&opt, model)
        });
        join(ends.unwrap(), model)
    };
    let one = named(&["wte"], Some(("head", "wte")));
    let saved = on(&one, "tp=2,dp=2", &|opt| {
        take_step(opt, &one, 0);
        checkpoint::save(opt, &store, Save::default()).unwrap();
    });
    let latest = store.latest().unwrap();
    let manifest = latest.manifest();
    assert_eq!(manifest.tensors.keys().collect::<Vec<_>>(), ["ln", "wte"]);
    assert_eq!(manifest.mesh, "dp=2,tp=2");
    let load = |opt: &mut Optimizer| drop(checkpoint::load(opt, &store, Load::default()).unwrap());
    let turned = on(&named(&["head"], Some(("wte", "head"))), "tp=4", &load);
    let two = on(&named(&["head", "wte"], None), "dp=3", &load);
    // A checkpoint without ties, saved under the name that is an alias in this model.
    let alone = named(&["head"], None);
    let untied = on(&alone, "tp=2", &|opt| {
        take_step(opt, &alone, 0);
        checkpoint::save(opt, &store, Save { step: Some(2), ..Save::default() }).unwrap();
    });
    let found = on(&one, "tp=1,dp=2", &load);
    let of = |whole: &Whole, name: &str| whole[&(name.to_owned(), "param".to_owned())].clone();
    assert_eq!(of(&found, "wte"), of(&untied, "head"));
    for slot in ["param", "m", "v", "t"] {
        let of = |whole: &Whole, name: &str| whole[&(name.to_owned(), slot.to_owned())].clone();
        let expected = of(&saved, "wte");
        assert_eq!(
            [of(&turned, "head"), of(&two, "head"), of(&two, "wte")],
            [(); 3].map(|()| expected.clone())
        );
    }
}

/// Returns the rows that a rank holds of a parameter of one or two dimensions: offset in the rank's part, index of the first element in
/// the whole, and number of elements.
fn rows(shape: &[usize], pieces: &[Piece]) -> Vec<(usize, usize, usize)> {
    let cut = |ranges: &[Range<usize>]| match ranges {
        [columns] => (0..1, columns.clone()),
        [rows, columns] => (rows.clone(), columns.clone()),
        _ => panic!("{shape:?}"),
    };
    let all = shape[shape.len() - 1];
    let width = pieces.iter().map(|piece| cut(&piece.local).1.end).max().unwrap_or(0);
    let mut held = Vec::new();
    for piece in pieces {
        let ((local, own), (global, columns)) = (cut(&piece.local), cut(&piece.global));
        let row = |(i, j): (usize, usize)| (i * width + own.start, j * all + columns.start, own.len());
        held.extend(local.zip(global).map(row));
    }
    held
}

/// Tensors of several windows, cut by rows and columns; each element equals its index.
#[test]
fn long_tensors_are_put_together_window_by_window() {
    let whole = Placement::whole();
    let model = Model::builder()
        .param("columns", &[1037, 1024], DType::F32, whole.clone().cut(Axis::Tp, 1))
        .param(
            "blocks",
            &[40, 9216],
            DType::F32,
            whole.clone().cut_in_blocks(Axis::Tp, 1, [4096, 4096, 1024]),
        )
        .param("whole", &[700_001], DType::F32, whole)
        .build()
        .unwrap();
    // Windows of state behave as those of parameters; only long runs add them.
    let rules = || if long() { Groups::new(AdamW::default()) } else { Groups::new(Sgd::default()) };
    let make = |world, mesh: &str, stage, numbered: bool| {
        let options = Options { stage, bucket_len: Some(300_000), meter: Meter::new(), ..Options::default() };
        let fill = |p: &Parameter, pieces: &[Piece], mut values: SliceMut<'_>| {
            let mut own = vec![-1f32; values.len()];
            for (at, first, len) in rows(&p.shape, pieces).into_iter().filter(|_| numbered) {
                own[at..at + len].iter_mut().zip(first + 1..).for_each(|(x, n)| *x = n as f32);
            }
            values.copy_from(Slice::from(&own[..]))
        };
        Optimizer::new(world, mesh.parse().unwrap(), &model, rules(), fill, options).unwrap()
    };
    let meshes = [
        ("tp=4", Stage::Zero1),
        ("tp=1,dp=3", Stage::Zero3),
        ("tp=2,dp=2", Stage::Zero2),
        ("dp=2", Stage::Replicated),
    ];
    for (i, (from, stage)) in meshes.into_iter().enumerate().filter(|(i, _)| tried(*i, 1)) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let mesh: Mesh = from.parse().unwrap();
        let saved = loopback::spawn(mesh.world_size(), |world| {
            checkpoint::save(&mut make(world, from, stage, true), &store, Save::default()).unwrap();
        });
        saved.unwrap();
        // Short runs load each checkpoint onto the next mesh, long runs onto all.
        let all = meshes.into_iter().enumerate();
        for (_, (to, stage)) in all.filter(|(j, _)| long() || *j == (i + 1) % meshes.len()) {
            let mesh: Mesh = to.parse().unwrap();
            let loaded = loopback::spawn(mesh.world_size(), |world| {
                let mut opt = make(world, to, stage, false);
                checkpoint::load(&mut opt, &store, Load::default()).unwrap();
                for parameter in model.parameters() {
                    let Parameter { name, shape, placement, .. } = parameter;
                    let pieces = placement.pieces(name, shape, &mesh, opt.coordinate()).unwrap();
                    let held = rows(shape, &pieces);
                    let unit =
                        opt.gather(opt.optimizer().unit_of(&parameter.name).unwrap().unwrap()).unwrap();
                    let values = unit.param(&parameter.name).unwrap().typed::<f32>().unwrap();
                    assert_eq!(held.iter().map(|(.., len)| len).sum::<usize>(), values.len());
                    let numbered = |&(at, first, len): &(usize, usize, usize)| {
                        values[at..at + len].iter().zip(first + 1..).all(|(&value, n)| value == n as f32)
                    };
                    assert!(held.iter().all(numbered), "{from} to {to}");
                }
            });
            loaded.unwrap();
        }
    }
}
