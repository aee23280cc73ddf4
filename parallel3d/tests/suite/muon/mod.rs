//! Muon on meshes that cut matrices and replicate state: the bits of one rank, and the bytes of the plan.

mod bits;
mod bytes;
#[cfg(feature = "checkpoint")]
mod checkpoint;
mod lost;
mod refused;

use crate::common::{fill, held, values};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, Blocks, Muon};
use meshstep_parallel3d::{Axis, Coordinate, Gradient, Mesh, Model, Optimizer, Parameter, Placement};
use meshstep_shard::{Combine, Groups, Options, Outcome, Stage, Step, StepArgs};
use meshstep_tensor::{DType, Meter};
use std::sync::Arc;

/// Parts of a step's gradient, which data ranks and micro-batches divide.
const PARTS: usize = 12;

/// Matrices cut by rows, by columns, and in blocks of either; fused ones, experts, matrices that ranks along tp hold whole, and
/// parameters of AdamW.
fn model(dtype: DType) -> Model {
    let whole = Placement::whole();
    let cut = |dim| whole.clone().cut(Axis::Tp, dim);
    Model::builder()
        .param("embedding", &[16, 3], dtype, cut(0))
        .unit("h0")
        .param("up", &[16, 9], dtype, cut(0))
        .param("down", &[7, 20], dtype, cut(1))
        .param("ln", &[9], dtype, whole.clone().gradient(Gradient::PartialSum))
        .unit("h1")
        .param("qkv", &[24, 5], dtype, whole.clone().cut_in_blocks(Axis::Tp, 0, [8; 3]))
        .param("conv1d", &[6, 16], dtype, whole.clone().cut_in_blocks(Axis::Tp, 1, [8, 4, 4]))
        .param("experts", &[3, 8, 5], dtype, cut(1))
        .param("by_expert", &[4, 6, 7], dtype, cut(0))
        .param("router", &[6, 11], dtype, whole.clone().gradient(Gradient::PartialSum))
        .param("same", &[13, 4], dtype, whole)
        .build()
        .unwrap()
}

fn rules() -> Groups {
    let muon = |blocks| Muon { blocks, weight_decay: 0.1, ..Muon::moonshot() };
    Groups::new(AdamW::default())
        .with(muon(Blocks::Whole), ["up", "down", "conv1d", "same"])
        .with_lr(Muon::keller_jordan(), 0.5, ["router"])
        .with(muon(Blocks::Rows(3)), ["qkv"])
        .with_lr(muon(Blocks::Batch), 2.0, ["experts", "by_expert"])
}

fn options(stage: Stage) -> Options {
    Options { stage, combine: Combine::Sum, bucket_len: Some(150), ..Options::default() }
}

/// Returns part `part` of the gradient of element `i`: a small integer.
fn part_of_gradient(parameter: &Parameter, i: usize, part: usize, step: usize) -> f32 {
    let salt: usize = parameter.name.bytes().map(usize::from).sum();
    ((i * i + 3 * i + part * 13 + step * 5 + salt * 3) % 17) as f32 - 8.0
}

/// Takes a step of `batches` micro-batches, whose gradients have the same exact sum on every mesh. Returns its norm and factor.
fn take_step(opt: &mut Optimizer, model: &Model, (step, batches): (usize, usize)) -> (u64, u64) {
    let (mesh, at) = (opt.mesh().clone(), opt.coordinate().clone());
    let data = mesh.resolve(Axis::Dp | Axis::Cp);
    let first = index(&mesh, &at) * batches;
    let units = mesh.degree(data) * batches;
    for batch in first..first + batches {
        let is_last = batch + 1 == first + batches;
        let mb = if is_last { opt.micro_batch(1).unwrap() } else { opt.accumulate(1).unwrap() };
        for parameter in model.parameters().iter().rev() {
            let Parameter { name, shape, placement, .. } = parameter;
            let held = held(parameter, &placement.pieces(name, shape, &mesh, &at).unwrap());
            let is_part = matches!(name.as_str(), "ln" | "router") && at.along(Axis::Tp) > 0;
            let own = (0..PARTS).filter(|part| part % units == batch && !is_part);
            let sum =
                |i: usize| own.clone().map(|part| part_of_gradient(parameter, i, part, step)).sum::<f32>();
            mb.grad(name, &held.into_iter().map(sum).collect::<Vec<f32>>()[..]).unwrap();
        }
        mb.finish().unwrap();
    }
    match opt.step(StepArgs { lr: 0.05, max_norm: Some(40.0), grad_scale: 1.0 }).unwrap().outcome().unwrap() {
        Outcome::Applied { norm, coef, .. } => (norm.to_bits(), coef.to_bits()),
        Outcome::Skipped { .. } => panic!("gradients are finite"),
    }
}

/// Returns the index of a rank among those with other data.
fn index(mesh: &Mesh, at: &Coordinate) -> usize {
    mesh.place(at, Axis::Dp) * mesh.degree(Axis::Cp) + at.along(Axis::Cp)
}

/// Whole parameters, and the norm and factor of each step.
type End = (Vec<Vec<f32>>, Vec<(u64, u64)>);

/// Trains `steps` on a mesh and returns the end, after `before` on the new optimizer, and `after` at the end.
fn train(
    (model, mesh): (&Model, &str),
    with: (&Groups, &Options),
    (steps, batches): (std::ops::Range<usize>, usize),
    [before, after]: [&(dyn Fn(&mut Optimizer) + Sync); 2],
) -> End {
    let mesh: Mesh = mesh.parse().unwrap();
    let ranks = loopback::spawn(mesh.world_size(), |world: Arc<dyn Communicator>| {
        let options = Options { meter: Meter::new(), ..with.1.clone() };
        let mut opt = Optimizer::new(world, mesh.clone(), model, with.0.clone(), fill, options).unwrap();
        before(&mut opt);
        let norms: Vec<_> = steps.clone().map(|step| take_step(&mut opt, model, (step, batches))).collect();
        after(&mut opt);
        let at = opt.coordinate().clone();
        let own = |p: &Parameter| {
            let Parameter { name, shape, placement, .. } = p;
            (held(p, &placement.pieces(name, shape, &mesh, &at).unwrap()), values(&opt, name))
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
    assert!(whole.iter().flatten().all(|value| value.is_finite()));
    (whole, ranks[0].1.clone())
}
