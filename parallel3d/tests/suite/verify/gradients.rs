//! Comparison of reduced gradients.

use super::{built, differs};
use meshstep_comm::{Communicator, loopback};
use meshstep_parallel3d::{Axes, Axis};
use meshstep_shard::{Owners, Stage, Step};
use std::sync::Arc;

/// Ranks along tp with different gradients for a shared parameter: reported before the gradients are applied.
#[test]
fn gradients_that_should_be_the_same_are_compared() {
    for stage in [Stage::Replicated, Stage::Zero1] {
        let told = loopback::spawn(8, |world: Arc<dyn Communicator>| {
            let mut opt = built(world, "tp=4,dp=2", stage);
            let tp = opt.coordinate().along(Axis::Tp);
            let lens: Vec<(String, usize)> =
                opt.optimizer().params().map(|p| (p.name().to_owned(), p.len())).collect();
            let mb = opt.micro_batch(1).unwrap();
            for (name, len) in &lens {
                let mut grad = vec![1f32; *len];
                if tp == 2 && name == "pos" {
                    grad[65] = 1.5;
                }
                // Partial gradients may differ until the step sums them.
                if name == "ln" {
                    grad.fill(1.0 + tp as f32);
                }
                mb.grad(name, &grad[..]).unwrap();
            }
            mb.finish().unwrap();
            let told = opt.verify_gradients().unwrap_err();
            opt.discard_gradients().unwrap();
            differs(told)
        });
        for told in told.unwrap() {
            let difference = &told.difference;
            assert_eq!((&difference.param[..], difference.slot, told.element), ("pos", "grad", Some(65)));
            assert_eq!(told.axes, Axes::from(Axis::Tp));
            assert!(told.at.iter().all(|at| at.along(Axis::Tp) == 2), "{told}");
        }
    }
}

/// Gradients with a further reduction are compared among the ranks that hold the same values before it.
#[test]
fn gradients_that_are_reduced_further_are_compared_before() {
    let zero3 = [Stage::Zero1, Stage::Zero2, Stage::Zero3];
    let whole = [Stage::Replicated, Stage::WholeParams(Owners::RoundRobin)];
    for stage in whole.into_iter().chain(zero3) {
        let told = loopback::spawn(8, |world: Arc<dyn Communicator>| {
            let mut opt = built(world, "dp_replicate=2,dp_shard=2,tp=2", stage);
            let (tp, copy) = (opt.coordinate().along(Axis::Tp), opt.coordinate().along(Axis::DpReplicate));
            let lens: Vec<(String, usize)> =
                opt.optimizer().params().map(|p| (p.name().to_owned(), p.len())).collect();
            let mut verify = |odd: &str| {
                let mb = opt.micro_batch(1).unwrap();
                for (name, len) in &lens {
                    // Each replica has different data.
                    let mut grad = vec![1.0 + copy as f32; *len];
                    if tp == 1 && copy == 1 && name == odd {
                        grad[65] = 9.0;
                    }
                    // Partial gradients may differ until the step sums them.
                    if name == "ln" {
                        grad.fill(1.0 + tp as f32);
                    }
                    mb.grad(name, &grad[..]).unwrap();
                }
                mb.finish().unwrap();
                let told = opt.verify_gradients();
                opt.discard_gradients().unwrap();
                told
            };
            let clean = verify("none").unwrap();
            // If gradients are divided, only `pos` has other ranks with the same values, along tp.
            let compared = if whole.contains(&stage) { 5 } else { 1 };
            assert_eq!((clean.compared, clean.unchecked), (compared, 5 - compared), "{stage:?}");
            differs(verify("pos").unwrap_err())
        });
        for told in told.unwrap() {
            let difference = &told.difference;
            assert_eq!((&difference.param[..], difference.slot, told.element), ("pos", "grad", Some(65)));
            assert_eq!(told.axes, Axes::from(Axis::Tp), "{told}");
            assert!(told.at.iter().all(|at| at.along(Axis::DpReplicate) == 1), "{told}");
        }
    }
}
