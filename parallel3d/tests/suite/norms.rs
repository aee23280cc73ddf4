//! Norms over a mesh: every type, equal clipping on all ranks, and steps skipped for non-finite gradients on any rank.

use crate::common::{
    AT, MESHES, PERIOD, STAGES, STEPS, TOKENS, arrangements, fill, gradient, model, read, run, token_grad,
    values,
};
use meshstep_cases::{long, tried};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, Norm};
use meshstep_parallel3d::{Mesh, Optimizer};
use meshstep_shard::{Combine, Options, Outcome, Stage, Step};
use meshstep_tensor::DType::F32;
use std::sync::Arc;

/// Returns the magnitudes of the whole gradient of a step, which are exact.
fn magnitudes(step: usize) -> Vec<f64> {
    let mean = |p: &meshstep_parallel3d::Parameter, i: usize| {
        let sum: f32 = (0..TOKENS).map(|token| token_grad(p, i, token, step)).sum();
        f64::from(sum / TOKENS as f32).abs()
    };
    let model = model(F32);
    let mut all = Vec::new();
    for p in model.parameters() {
        let period: Vec<f64> = (0..PERIOD).map(|i| mean(p, i)).collect();
        all.extend(period.iter().cycle().take(p.shape.iter().product::<usize>()));
    }
    all
}

/// With few elements and many ranks, some ranks own nothing. `run` compares the ranks' norms and factors.
#[test]
fn every_norm_is_that_of_the_whole_gradient() {
    let magnitudes: Vec<Vec<f64>> = (0..STEPS).map(magnitudes).collect();
    let expected = |norm: Norm, step: usize| {
        let g = &magnitudes[step];
        match norm {
            Norm::L1 => g.iter().sum(),
            Norm::L2 => g.iter().map(|g| g * g).sum::<f64>().sqrt(),
            Norm::Inf => g.iter().copied().fold(0.0, f64::max),
            Norm::P(p) => g.iter().map(|g| g.powf(p)).sum::<f64>().powf(1.0 / p),
        }
    };
    for (n, norm) in [Norm::L1, Norm::L2, Norm::P(3.0), Norm::Inf].into_iter().enumerate() {
        // Short runs try each mesh and stage with one norm, long runs with all.
        for (_, mesh, stage) in arrangements().filter(|(i, ..)| long() || i / MESHES.len() % 4 == n) {
            let (combine, bucket_len) = (Combine::Weighted, Some(40));
            let options = Options { stage, norm, combine, bucket_len, ..Options::default() };
            let (_, found) = run(&model(F32), mesh, &options);
            for (step, (norm_bits, coef)) in found.into_iter().enumerate() {
                let (found, expected) = (f64::from_bits(norm_bits), expected(norm, step));
                // Only powers round.
                let off = if norm == Norm::P(3.0) { 1e-14 * expected } else { 0.0 };
                assert!(
                    (found - expected).abs() <= off,
                    "{norm:?} {mesh} {stage:?}: {found}, not {expected}"
                );
                assert_eq!(f64::from_bits(coef), 3.0 / (found + 1e-6), "{norm:?} {mesh} {stage:?}");
            }
        }
    }
}

/// Returns all data that a step may change. Collective.
fn dump(opt: &Optimizer, names: &[String]) -> Vec<(Vec<u32>, Vec<Vec<u32>>, u64)> {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let one = |name: &String| {
        let state = opt.state(name).unwrap();
        let slots = state.slots.into_iter().map(|(_, values)| bits(read(values))).collect();
        (bits(values(opt, name)), slots, state.t)
    };
    names.iter().map(one).collect()
}

/// A non-finite element in one rank's gradient, for each kind of parameter and each rank in turn, including ranks with elements that only
/// another rank counts.
#[test]
fn what_is_not_finite_on_one_rank_skips_the_step_on_all() {
    let meshes = ["tp=2,cp=2,dp=2", "dp_replicate=2,dp_shard=2,tp=2", "tp=4,dp=2"];
    let all = meshes.into_iter().flat_map(|mesh| STAGES.map(|stage| (mesh, stage)));
    // Short runs try one or two combinations of each mesh and stage, long runs all.
    let some = |i: usize| long() || (i / STAGES.len() + i % STAGES.len()).is_multiple_of(3);
    for (_, (mesh, stage)) in all.enumerate().filter(|(i, _)| some(*i) && tried(*i, 1)) {
        let ranks = loopback::spawn(8, |world: Arc<dyn Communicator>| {
            skips(world, mesh.parse().unwrap(), stage);
        });
        ranks.unwrap();
    }
}

fn skips(world: Arc<dyn Communicator>, mesh: Mesh, stage: Stage) {
    let (model, rank) = (model(F32), world.rank());
    let at = mesh.coordinate(rank).unwrap();
    let names: Vec<String> = model.parameters().iter().map(|p| p.name.clone()).collect();
    let options =
        || Options { stage, combine: Combine::Weighted, bucket_len: Some(40), ..Options::default() };
    let new =
        |options| Optimizer::new(Arc::clone(&world), mesh.clone(), &model, AdamW::default(), fill, options);
    let (mut opt, mut undisturbed) = (new(options()).unwrap(), new(options()).unwrap());
    let step = |opt: &mut Optimizer, step: usize, bad: Option<(&str, f32)>| {
        let mb = opt.micro_batch(1).unwrap();
        for parameter in model.parameters() {
            let mut grads = gradient(parameter, &mesh, &at, step);
            if let Some((_, value)) = bad.filter(|(name, _)| *name == parameter.name) {
                *grads.last_mut().unwrap() = value;
            }
            mb.grad(&parameter.name, &grads[..]).unwrap();
        }
        mb.finish().unwrap();
        opt.step(AT).unwrap().outcome().unwrap()
    };
    for (i, culprit) in (0..world.world_size()).enumerate() {
        assert!(matches!(step(&mut opt, i % STEPS, None), Outcome::Applied { .. }));
        let _ = step(&mut undisturbed, i % STEPS, None);
        // Skipped steps leave it unchanged.
        let before = dump(&opt, &names);
        for (skipped, name) in names.iter().enumerate() {
            let value = [f32::NAN, f32::INFINITY][skipped % 2];
            let outcome = step(&mut opt, 0, (culprit == rank).then_some((name, value)));
            let what =
                format!("{name} on rank {culprit} of {mesh} under {stage:?}: {outcome:?} on rank {rank}");
            let Outcome::Skipped { non_finite, in_a_row, .. } = outcome else { panic!("{what}") };
            assert!(non_finite > 0 && in_a_row == skipped as u32 + 1, "{what}");
            assert_eq!(dump(&opt, &names), before, "{what}");
        }
    }
    assert_eq!(dump(&opt, &names), dump(&undisturbed, &names));
}
