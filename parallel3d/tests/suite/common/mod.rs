//! A model with every kind of placement, trained with gradients that have exact sums.

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_parallel3d::{Axis, Coordinate, Gradient, Mesh, Model, Optimizer, Parameter, Piece, Placement};
use meshstep_shard::{Groups, Options, Outcome, Owners, Stage, Step, StepArgs};
use meshstep_tensor::{DType, Error, Meter, Slice, SliceMut, bf16, f16};
use std::ops::Range;
use std::sync::Arc;

pub(crate) const STEPS: usize = 5;
/// Tokens of a step, distributed over the ranks along dp and cp.
pub(crate) const TOKENS: usize = 8;
pub(crate) const AT: StepArgs = StepArgs { lr: 0.05, max_norm: Some(3.0), grad_scale: 1.0 };

pub(crate) const MESHES: [&str; 8] = [
    "tp=2,cp=2,dp=2",
    "tp=1",
    "tp=2,dp=4",
    "cp=4,dp=2",
    "tp=8",
    "dp=8",
    "dp_replicate=2,dp_shard=2,tp=2",
    "dp_replicate=2,dp_shard=2,cp=2",
];
pub(crate) const STAGES: [Stage; 5] =
    [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3, Stage::WholeParams(Owners::SortedGreedy)];

/// Returns every mesh with every stage, numbered. A mesh repeats only after all others, with another stage. Short runs try a tenth.
pub(crate) fn arrangements() -> impl Iterator<Item = (usize, &'static str, Stage)> {
    let all = (0..MESHES.len() * STAGES.len()).filter(|&i| meshstep_cases::tried(i, 1));
    // The counts of meshes and stages are coprime.
    all.map(|i| (i, MESHES[i % MESHES.len()], STAGES[3 * i % STAGES.len()]))
}

/// Every kind of placement: rows, columns, blocks, whole with equal gradients, whole with gradients to sum or to average.
pub(crate) fn model(dtype: DType) -> Model {
    let whole = Placement::whole();
    Model::builder()
        .param("wte", &[16, 3], dtype, whole.clone().cut(Axis::Tp, 0))
        .unit("in")
        .param("pos", &[5, 3], dtype, whole.clone())
        .unit("block")
        .param("ln", &[7], dtype, whole.clone().gradient(Gradient::PartialSum))
        .param("qkv", &[32, 3], dtype, whole.clone().cut_in_blocks(Axis::Tp, 0, [16, 8, 8]))
        .param("out", &[3, 16], dtype, whole.clone().cut(Axis::Tp, 1))
        .param("qk_norm", &[4], dtype, whole.gradient(Gradient::PartialMean))
        .tied("head", "wte", &[16, 3])
        .build()
        .unwrap()
}

/// Number of steps of `run`: fewer except in long runs.
fn steps() -> usize {
    if meshstep_cases::long() { STEPS } else { 3 }
}

/// Period of a token's gradient in elements.
pub(crate) const PERIOD: usize = 23;

/// Returns the gradient of a token; sums of its eighths are exact.
pub(crate) fn token_grad(parameter: &Parameter, i: usize, token: usize, step: usize) -> f32 {
    let salt: usize = parameter.name.bytes().map(usize::from).sum();
    ((i * 7 + token * 13 + step * 5 + salt * 3) % PERIOD) as f32 * 8.0 - 88.0
}

pub(crate) fn first(parameter: &Parameter, i: usize) -> f32 {
    ((i * 5 + parameter.name.len()) % 13) as f32 / 8.0 - 0.5
}

/// Returns the elements of a parameter in `pieces`, in storage order.
pub(crate) fn held(parameter: &Parameter, pieces: &[Piece]) -> Vec<usize> {
    let end = |dim: usize| pieces.iter().map(|piece| piece.local[dim].end).max().unwrap();
    let local: Vec<usize> = (0..parameter.shape.len()).map(end).collect();
    let mut held = vec![usize::MAX; local.iter().product()];
    for piece in pieces {
        let extents: Vec<usize> = piece.local.iter().map(Range::len).collect();
        for n in 0..extents.iter().product() {
            let (mut rest, mut place, mut index, mut strides) = (n, 0, 0, (1, 1));
            for dim in (0..extents.len()).rev() {
                let at = rest % extents[dim];
                rest /= extents[dim];
                place += (piece.local[dim].start + at) * strides.0;
                index += (piece.global[dim].start + at) * strides.1;
                strides = (strides.0 * local[dim], strides.1 * parameter.shape[dim]);
            }
            held[place] = index;
        }
    }
    held
}

/// Returns the elements that the rank at `at` holds.
pub(crate) fn held_at(parameter: &Parameter, mesh: &Mesh, at: &Coordinate) -> Vec<usize> {
    let Parameter { name, shape, placement, .. } = parameter;
    held(parameter, &placement.pieces(name, shape, mesh, at).unwrap())
}

/// Sets the first values of a rank's part.
pub(crate) fn fill(parameter: &Parameter, pieces: &[Piece], mut values: SliceMut<'_>) -> Result<(), Error> {
    let own: Vec<f32> = held(parameter, pieces).into_iter().map(|i| first(parameter, i)).collect();
    values.cast_from((&own[..]).into())
}

/// Reads values of f32 or a shorter type.
pub(crate) fn read(values: Slice<'_>) -> Vec<f32> {
    match values.dtype() {
        DType::F16 => values.typed::<f16>().unwrap().iter().map(|x| x.to_f32()).collect(),
        DType::BF16 => values.typed::<bf16>().unwrap().iter().map(|x| x.to_f32()).collect(),
        _ => values.typed::<f32>().unwrap().to_vec(),
    }
}

/// Returns a parameter's values, gathered if they are sharded.
pub(crate) fn values(opt: &Optimizer, name: &str) -> Vec<f32> {
    let unit = opt.gather(opt.optimizer().unit_of(name).unwrap().unwrap()).unwrap();
    read(unit.param(name).unwrap())
}

/// Returns every unit's name and parameters.
fn units<'m>(opt: &Optimizer, model: &'m Model) -> Vec<(String, Vec<&'m Parameter>)> {
    let of = |unit: &str| {
        let own = |p: &&Parameter| opt.optimizer().unit_of(&p.name).unwrap() == Some(unit);
        (unit.to_owned(), model.parameters().iter().filter(own).collect())
    };
    opt.optimizer().units().map(of).collect()
}

/// Returns a rank's gradient: the mean over its own tokens, or its part of that mean.
pub(crate) fn gradient(parameter: &Parameter, mesh: &Mesh, at: &Coordinate, step: usize) -> Vec<f32> {
    let ranks = mesh.degree(Axis::Dp | Axis::Cp);
    let place = mesh.place(at, Axis::Dp) * mesh.degree(Axis::Cp) + at.along(Axis::Cp);
    let own = TOKENS / ranks;
    let tokens = place * own..(place + 1) * own;
    let tp = mesh.degree(Axis::Tp) as f32;
    let part = match parameter.name.as_str() {
        // Unequal parts that add up to the whole, or have it as mean.
        "ln" if at.along(Axis::Tp) == 0 => (tp + 1.0) / (2.0 * tp),
        "ln" => 1.0 / (2.0 * tp),
        "qk_norm" if at.along(Axis::Tp) == 0 => (tp + 1.0) / 2.0,
        "qk_norm" => 0.5,
        _ => 1.0,
    };
    let mean = |i: usize| {
        tokens.clone().map(|token| token_grad(parameter, i, token, step)).sum::<f32>() / own as f32
    };
    let own: Vec<f32> = (0..PERIOD).map(|i| mean(i) * part).collect();
    held_at(parameter, mesh, at).into_iter().map(|i| own[i % PERIOD]).collect()
}

/// Returns AdamW for all parameters; one of them does not decay.
pub(crate) fn adamw() -> Groups {
    let decay = AdamW { weight_decay: 0.1, ..AdamW::default() };
    Groups::new(decay.clone()).with(AdamW { weight_decay: 0.0, ..decay }, ["ln"])
}

/// Returns an optimizer of the model with these rules.
pub(crate) fn build(
    world: Arc<dyn Communicator>,
    model: &Model,
    mesh: &Mesh,
    (rules, options): (&Groups, &Options),
) -> Optimizer {
    let options = Options { meter: Meter::new(), ..options.clone() };
    Optimizer::new(world, mesh.clone(), model, rules.clone(), fill, options).unwrap()
}

/// Takes one step; returns its norm and clipping factor.
pub(crate) fn take_step(opt: &mut Optimizer, model: &Model, step: usize) -> (u64, u64) {
    let (mesh, at, units) = (opt.mesh().clone(), opt.coordinate().clone(), units(opt, model));
    let tokens = TOKENS / mesh.degree(Axis::Dp | Axis::Cp);
    let mb = opt.micro_batch(tokens as u64).unwrap();
    // Each unit is used while the next is in flight.
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
    match opt.step(AT).unwrap().outcome().unwrap() {
        Outcome::Applied { norm, coef, .. } => (norm.to_bits(), coef.to_bits()),
        Outcome::Skipped { .. } => panic!("gradients are finite"),
    }
}

/// A rank's elements of each parameter and their values, and the norm and factor of each step.
type RankRun = (Vec<(Vec<usize>, Vec<f32>)>, Vec<(u64, u64)>);

/// Runs on one rank.
pub(crate) fn on_rank(
    world: Arc<dyn Communicator>,
    model: &Model,
    mesh: &Mesh,
    options: &Options,
) -> RankRun {
    on_rank_with(world, model, mesh, (&adamw(), options))
}

fn on_rank_with(
    world: Arc<dyn Communicator>,
    model: &Model,
    mesh: &Mesh,
    with: (&Groups, &Options),
) -> RankRun {
    let at = mesh.coordinate(world.rank()).unwrap();
    let mut opt = build(world, model, mesh, with);
    let norms: Vec<_> = (0..steps()).map(|step| take_step(&mut opt, model, step)).collect();
    let own = |p: &Parameter| (held_at(p, mesh, &at), values(&opt, &p.name));
    (model.parameters().iter().map(own).collect(), norms)
}

/// Parameters assembled from all ranks, and the norm and factor of each step.
pub(crate) type Run = (Vec<Vec<f32>>, Vec<(u64, u64)>);

pub(crate) fn run(model: &Model, mesh: &str, options: &Options) -> Run {
    run_with(model, mesh, (&adamw(), options))
}

/// Runs with these rules.
pub(crate) fn run_with(model: &Model, mesh: &str, with: (&Groups, &Options)) -> Run {
    let mesh: Mesh = mesh.parse().unwrap();
    let ranks = loopback::spawn(mesh.world_size(), |world| on_rank_with(world, model, &mesh, with));
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
