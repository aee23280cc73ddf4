//! Steps on meshes: with exact sums, every mesh and stage gives the same parameters and norms, bit for bit.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, Muon, Rounding, Sgd};
use meshstep_parallel3d::{
    Axis, Coordinate, Error, Gradient, Mesh, MeshError, Model, Optimizer, Parameter, Piece, Placement,
};
use meshstep_shard::{At, Clip, Combine, Groups, Moments, Options, Outcome, Owners, Precision, Stage};
use meshstep_tensor::DType::F32;
use std::ops::Range;
use std::sync::Arc;

const STEPS: usize = 5;
/// Tokens of a step's data, which the ranks along dp and cp share out.
const TOKENS: usize = 8;
const AT: At = At { lr: 0.05, max_norm: Some(3.0), grad_scale: 1.0 };

const MESHES: [&str; 8] = [
    "tp=2,cp=2,dp=2",
    "tp=1",
    "tp=2,dp=4",
    "cp=4,dp=2",
    "tp=8",
    "dp=8",
    "dp_replicate=2,dp_shard=2,tp=2",
    "dp_replicate=2,dp_shard=2,cp=2",
];
const STAGES: [Stage; 5] =
    [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3, Stage::WholeParams(Owners::SortedGreedy)];

/// Every kind of placement: by rows, by columns, in blocks, whole with equal gradients, with parts to add, with parts to average.
fn model() -> Model {
    let whole = Placement::whole();
    Model::builder()
        .param("wte", &[16, 3], F32, whole.clone().cut(Axis::Tp, 0))
        .unit("in")
        .param("pos", &[5, 3], F32, whole.clone())
        .unit("block")
        .param("ln", &[7], F32, whole.clone().gradient(Gradient::PartialSum))
        .param("qkv", &[32, 3], F32, whole.clone().cut_in_blocks(Axis::Tp, 0, [16, 8, 8]))
        .param("out", &[3, 16], F32, whole.clone().cut(Axis::Tp, 1))
        .param("qk_norm", &[4], F32, whole.gradient(Gradient::PartialMean))
        .tied("head", "wte", &[16, 3])
        .build()
        .unwrap()
}

/// The gradient of a token: eighths of it add up exactly.
fn token_grad(parameter: &Parameter, i: usize, token: usize, step: usize) -> f32 {
    let salt: usize = parameter.name.bytes().map(usize::from).sum();
    ((i * 7 + token * 13 + step * 5 + salt * 3) % 23) as f32 * 8.0 - 88.0
}

fn first(parameter: &Parameter, i: usize) -> f32 {
    ((i * 5 + parameter.name.len()) % 13) as f32 / 8.0 - 0.5
}

/// The elements of a parameter that pieces hold, in the order they hold them.
fn held(parameter: &Parameter, pieces: &[Piece]) -> Vec<usize> {
    let columns = parameter.shape.get(1).copied().unwrap_or(1);
    let local_columns = pieces[0].local.get(1).map_or(1, Range::len);
    let rows: usize = pieces.iter().map(|piece| piece.local[0].len()).sum();
    let mut held = vec![usize::MAX; rows * local_columns];
    for Piece { global, local } in pieces {
        let one = 0..1;
        let (across, local_across) = (global.get(1).unwrap_or(&one), local.get(1).unwrap_or(&one));
        for (row, local_row) in global[0].clone().zip(local[0].clone()) {
            for (column, local_column) in across.clone().zip(local_across.clone()) {
                held[local_row * local_columns + local_column] = row * columns + column;
            }
        }
    }
    held
}

/// What a rank brings: the mean over its own tokens, or its part of that.
fn gradient(parameter: &Parameter, mesh: &Mesh, at: &Coordinate, step: usize) -> Vec<f32> {
    let ranks = mesh.degree(Axis::Dp | Axis::Cp);
    let place = mesh.place(at, Axis::Dp) * mesh.degree(Axis::Cp) + at.along(Axis::Cp);
    let own = TOKENS / ranks;
    let tokens = place * own..(place + 1) * own;
    let tp = mesh.degree(Axis::Tp) as f32;
    let pieces = parameter.placement.pieces(&parameter.name, &parameter.shape, mesh, at).unwrap();
    let part = match parameter.name.as_str() {
        // Unequal parts that add up to the whole, or average to it.
        "ln" if at.along(Axis::Tp) == 0 => (tp + 1.0) / (2.0 * tp),
        "ln" => 1.0 / (2.0 * tp),
        "qk_norm" if at.along(Axis::Tp) == 0 => (tp + 1.0) / 2.0,
        "qk_norm" => 0.5,
        _ => 1.0,
    };
    let mean = |i: usize| {
        tokens.clone().map(|token| token_grad(parameter, i, token, step)).sum::<f32>() / own as f32
    };
    held(parameter, &pieces).into_iter().map(|i| mean(i) * part).collect()
}

/// Parameters put together from the ranks that hold them, and the norm and factor of each step.
type Run = (Vec<Vec<f32>>, Vec<(u64, u64)>);

fn run(mesh: &str, options: &Options) -> Run {
    let mesh: Mesh = mesh.parse().unwrap();
    let model = model();
    let ranks = loopback::spawn(mesh.world_size(), |world: Arc<dyn Communicator>| {
        let at = mesh.coordinate(world.rank()).unwrap();
        let decay = AdamW { weight_decay: 0.1, ..AdamW::default() };
        let rules = Groups::new(decay.clone()).with(AdamW { weight_decay: 0.0, ..decay }, ["ln", "qk_norm"]);
        let initial = |parameter: &Parameter, pieces: &[Piece], mut values: meshstep_tensor::SliceMut<'_>| {
            let own: Vec<f32> = held(parameter, pieces).into_iter().map(|i| first(parameter, i)).collect();
            values.copy_from((&own[..]).into())
        };
        let options = Options { meter: meshstep_tensor::Meter::new(), ..options.clone() };
        let mut opt = Optimizer::new(world, mesh.clone(), &model, rules, initial, options).unwrap();
        let units: Vec<(String, Vec<&Parameter>)> = opt
            .units()
            .map(|unit| {
                let own = |p: &&Parameter| opt.unit_of(&p.name).unwrap() == Some(unit);
                (unit.to_owned(), model.parameters().iter().filter(own).collect())
            })
            .collect();
        let mut norms = Vec::new();
        for step in 0..STEPS {
            let tokens = TOKENS / mesh.degree(Axis::Dp | Axis::Cp);
            let mb = opt.micro_batch(tokens as u64).unwrap();
            // Each unit while the next is on its way.
            let mut next = None;
            for (i, (unit, own)) in units.iter().enumerate().rev() {
                let here = next.take().unwrap_or_else(|| mb.start_gather(unit).unwrap()).wait().unwrap();
                next = i.checked_sub(1).map(|before| mb.start_gather(&units[before].0).unwrap());
                for parameter in own {
                    let grad = gradient(parameter, &mesh, &at, step);
                    assert_eq!(here.param(&parameter.name).unwrap().len(), grad.len());
                    mb.grad(&parameter.name, &grad[..]).unwrap();
                }
            }
            drop(next);
            mb.finish().unwrap();
            norms.push(match opt.step(AT).unwrap().outcome().unwrap() {
                Outcome::Applied { norm, coef, .. } => (norm.to_bits(), coef.to_bits()),
                Outcome::Skipped { .. } => panic!("gradients are finite"),
            });
        }
        let own = |p: &Parameter| {
            let pieces = p.placement.pieces(&p.name, &p.shape, &mesh, &at).unwrap();
            let unit = opt.gather(opt.unit_of(&p.name).unwrap().unwrap()).unwrap();
            (held(p, &pieces), unit.param(&p.name).unwrap().typed::<f32>().unwrap().to_vec())
        };
        (model.parameters().iter().map(own).collect::<Vec<_>>(), norms)
    });
    let ranks = ranks.unwrap();
    let mut whole: Vec<Vec<f32>> =
        model.parameters().iter().map(|p| vec![f32::NAN; p.shape.iter().product()]).collect();
    for (params, norms) in &ranks {
        assert_eq!(norms, &ranks[0].1, "norms part on {mesh}");
        for (whole, (held, values)) in whole.iter_mut().zip(params) {
            for (&i, &value) in held.iter().zip(values) {
                assert!(whole[i].is_nan() || whole[i].to_bits() == value.to_bits(), "copies part on {mesh}");
                whole[i] = value;
            }
        }
    }
    (whole, ranks[0].1.clone())
}

#[test]
fn every_mesh_and_stage_gives_the_same_bits() {
    let options =
        |stage| Options { stage, combine: Combine::Weighted, bucket_len: Some(100), ..Options::default() };
    let expected = run("tp=1", &options(Stage::Replicated));
    assert!(expected.1.iter().all(|&(_, coef)| f64::from_bits(coef) < 1.0), "clipped");
    for mesh in MESHES {
        for stage in STAGES {
            assert_eq!(run(mesh, &options(stage)), expected, "{mesh} {stage:?}");
        }
    }
}

/// Equal numbers of tokens on each rank: the mean of means is the mean.
#[test]
fn a_mean_of_means_is_the_mean_where_ranks_have_as_many_tokens() {
    let options = |combine| Options { combine, ..Options::default() };
    let expected = run("tp=1", &options(Combine::Weighted));
    for mesh in MESHES {
        assert_eq!(run(mesh, &options(Combine::Mean)), expected, "{mesh}");
    }
}

/// One valid token in a sequence that is cut along cp: by tokens its gradient is the same however it is cut, where the mean of the
/// ranks' means would divide it by their number.
#[test]
fn a_mask_does_not_show_how_a_sequence_is_cut() {
    let model = Model::builder().param("w", &[1], F32, Placement::whole()).build().unwrap();
    let moved = |cp: usize, combine: Combine| {
        let ranks = loopback::spawn(cp, |world: Arc<dyn Communicator>| {
            let (mesh, valid) = (format!("cp={cp}").parse().unwrap(), world.rank() == 0);
            let options = Options { combine, ..Options::default() };
            let mut opt =
                Optimizer::new(world, mesh, &model, Sgd::default(), |_, _, _| Ok(()), options).unwrap();
            let mb = opt.micro_batch(u64::from(valid)).unwrap();
            mb.grad("w", &[if valid { 3f32 } else { 0.0 }][..]).unwrap();
            mb.finish().unwrap();
            let _ = opt.step(At { lr: 1.0, ..At::default() }).unwrap().outcome().unwrap();
            opt.param("w").unwrap().typed::<f32>().unwrap()[0]
        });
        let ranks = ranks.unwrap();
        assert!(ranks.iter().all(|w| *w == ranks[0]));
        ranks[0]
    };
    assert_eq!([1, 2, 4].map(|cp| moved(cp, Combine::Weighted)), [-3.0; 3]);
    assert_eq!([1, 2, 4].map(|cp| moved(cp, Combine::Mean)), [-3.0, -1.5, -0.75]);
}

/// n ones have the norm sqrt(n), however many ranks hold them; the sum of all ranks' own squares is more.
#[test]
fn what_several_ranks_hold_counts_once() {
    let ones = Model::builder()
        .param("cut", &[8, 4], F32, Placement::whole().cut(Axis::Tp, 0))
        .param("whole", &[17], F32, Placement::whole())
        .build()
        .unwrap();
    for mesh in MESHES {
        for stage in STAGES {
            let mesh: Mesh = mesh.parse().unwrap();
            let norms = loopback::spawn(mesh.world_size(), |world: Arc<dyn Communicator>| {
                let options = Options { stage, ..Options::default() };
                let mut opt =
                    Optimizer::new(world, mesh.clone(), &ones, AdamW::default(), |_, _, _| Ok(()), options)
                        .unwrap();
                let mb = opt.micro_batch(1).unwrap();
                let mut squares = 0;
                for parameter in ones.parameters() {
                    let shape =
                        parameter.placement.local_shape(&parameter.name, &parameter.shape, &mesh).unwrap();
                    let len: usize = shape.iter().product();
                    squares += len;
                    mb.grad(&parameter.name, &vec![1f32; len][..]).unwrap();
                }
                mb.finish().unwrap();
                match opt.step(At::default()).unwrap().outcome().unwrap() {
                    Outcome::Applied { norm, .. } => (norm, squares),
                    Outcome::Skipped { .. } => panic!("gradients are finite"),
                }
            });
            let norms = norms.unwrap();
            assert!(norms.iter().all(|&(norm, _)| norm == 49f64.sqrt()), "{mesh} {stage:?}: {norms:?}");
            let naive: usize = norms.iter().map(|(_, squares)| squares).sum();
            assert!(mesh.world_size() == 1 || naive > 49, "{mesh}: a naive sum would be wrong");
        }
    }
}

/// Ones on four tensor-parallel ranks: parts add up to 4, average to 1, equal gradients are 1.
#[test]
fn parts_become_one_as_their_placement_says() {
    let parts = |gradient| Placement::whole().gradient(gradient);
    let model = Model::builder()
        .param("sum", &[1], F32, parts(Gradient::PartialSum))
        .param("mean", &[1], F32, parts(Gradient::PartialMean))
        .param("same", &[1], F32, parts(Gradient::Same))
        .build()
        .unwrap();
    let moved = loopback::spawn(4, |world: Arc<dyn Communicator>| {
        let (mesh, sgd) = ("tp=4".parse().unwrap(), Sgd::default());
        let mut opt = Optimizer::new(world, mesh, &model, sgd, |_, _, _| Ok(()), Options::default()).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        ["sum", "mean", "same"].iter().for_each(|name| mb.grad(name, &[1f32][..]).unwrap());
        mb.finish().unwrap();
        let _ = opt.step(At { lr: 1.0, ..At::default() }).unwrap().outcome().unwrap();
        ["sum", "mean", "same"].map(|name| opt.param(name).unwrap().typed::<f32>().unwrap()[0])
    });
    assert_eq!(moved.unwrap(), [[-4.0, -1.0, -1.0]; 4]);
}

#[test]
fn what_cannot_step_is_refused_on_every_rank() {
    let expert = Placement::whole().cut(Axis::Cp, 0).reduced_over(Axis::Dp);
    let model = |placement| {
        Model::builder()
            .param("w", &[4], F32, placement)
            .param("b", &[4], F32, Placement::whole())
            .build()
            .unwrap()
    };
    let refused = |mesh: &'static str, placement: Placement, rules: Groups, options: Options| -> Vec<Error> {
        let ranks = loopback::spawn(4, |world: Arc<dyn Communicator>| {
            let options = options.clone();
            Optimizer::new(
                world,
                mesh.parse().unwrap(),
                &model(placement.clone()),
                rules.clone(),
                |_, _, _| Ok(()),
                options,
            )
            .unwrap_err()
        });
        ranks.unwrap()
    };
    let adam = || Groups::new(AdamW::default());
    let all = |errors: Vec<Error>, is: fn(&Error) -> bool| assert!(errors.iter().all(is), "{errors:?}");
    let cut = Placement::whole().cut(Axis::Tp, 0);
    let on = Options::default;
    all(refused("tp=2,dp=4", cut.clone(), adam(), on()), |e| {
        matches!(e, Error::Mesh(MeshError::WorldSize { ranks: 8, .. }))
    });
    all(refused("pp=2,dp=2", cut.clone(), adam(), on()), |e| matches!(e, Error::Stages { stages: 2 }));
    all(refused("cp=2,dp=2", expert, adam(), on()), |e| {
        matches!(e, Error::Unequal { ranks: 2, data: 4, .. })
    });
    let named = adam().with(AdamW::default(), ["c"]);
    all(refused("tp=2,dp=2", cut.clone(), named, on()), |e| matches!(e, Error::UnknownParam { .. }));
    let clip = Options { clip: Clip::BeforeReduce, stage: Stage::Zero2, ..on() };
    all(refused("tp=2,dp=2", cut, adam(), clip), |e| matches!(e, Error::Shard(_)));
    let cut = || Placement::whole().cut(Axis::Tp, 0);
    let clip = Options { clip: Clip::BeforeReduce, ..on() };
    all(refused("tp=2,dp=2", cut(), adam(), clip), |e| {
        matches!(e, Error::Shard(meshstep_shard::Error::Shared { .. }))
    });
    let twice = Placement::whole().gradient(Gradient::PartialSum).reduced_over(Axis::Dp | Axis::Tp);
    all(refused("tp=2,dp=2", twice, adam(), on()), |e| {
        matches!(e, Error::Mesh(MeshError::PartialAndReduced { .. }))
    });
    let whole = Options { stage: Stage::WholeParams(Owners::SortedGreedy), ..on() };
    all(refused("tp=2,dp=2", cut(), Groups::new(Muon::default()), whole), |e| matches!(e, Error::Shard(_)));
    let weighted = Options { combine: Combine::Weighted, ..on() };
    all(refused("cp=2,dp=2", Placement::whole().reduced_over(Axis::Dp), adam(), weighted), |e| {
        matches!(e, Error::Unequal { ranks: 2, data: 4, .. })
    });
    let precision =
        Precision { rounding: Rounding::Stochastic, moments: Moments::BF16, ..Precision::default() };
    let stochastic = Options { precision, ..on() };
    all(refused("tp=2,dp=2", cut(), adam(), stochastic), |e| matches!(e, Error::StochasticCut { .. }));
}

/// One rank with another placement: every rank is told, none waits for a group that never forms.
#[test]
fn ranks_with_different_models_are_told() {
    let told = loopback::spawn(4, |world: Arc<dyn Communicator>| {
        let dim = usize::from(world.rank() == 2);
        let model =
            Model::builder().param("w", &[4, 4], F32, Placement::whole().cut(Axis::Tp, dim)).build().unwrap();
        let mesh = if world.rank() == 3 { "tp=4" } else { "tp=2,dp=2" }.parse().unwrap();
        Optimizer::new(world, mesh, &model, AdamW::default(), |_, _, _| Ok(()), Options::default())
            .unwrap_err()
    });
    for error in told.unwrap() {
        assert!(
            matches!(&error, Error::Shard(meshstep_shard::Error::Disagree { what, .. }) if what == "parameter 0"),
            "{error}"
        );
    }
}
