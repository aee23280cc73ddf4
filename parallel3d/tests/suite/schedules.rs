//! Learning rate schedules on a mesh: every rank's rate comes from the same step.

use crate::common::{fill, gradient, model, values};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_optim::schedule::{Cosine, Schedule};
use meshstep_parallel3d::{Error, Mesh, Optimizer};
use meshstep_shard::{Combine, Options, Outcome, Step, StepArgs};
use meshstep_tensor::DType::F32;
use std::sync::Arc;

fn options(warmup: u64) -> Options {
    let schedule = Some(Schedule::new(0.1, Cosine::new(warmup, 20)).unwrap());
    Options { schedule, combine: Combine::Weighted, ..Options::default() }
}

#[test]
fn another_schedule_on_one_rank_is_refused_before_any_step() {
    for odd in 0..8 {
        let told = loopback::spawn(8, |world: Arc<dyn Communicator>| {
            let (mesh, options) =
                ("tp=2,cp=2,dp=2".parse().unwrap(), options(2 + u64::from(world.rank() == odd)));
            Optimizer::new(world, mesh, &model(F32), AdamW::default(), fill, options).unwrap_err()
        });
        for error in told.unwrap() {
            let Error::Shard(meshstep_shard::Error::Disagree { what, .. }) = &error else {
                panic!("{error}")
            };
            assert_eq!(what, "curve of schedule");
            assert!(error.to_string().contains("num_warmup_steps: 3"), "{error}");
        }
    }
}

/// A schedule gives the same rates as passing them by hand, across a skipped step and a restored step count.
#[test]
fn a_schedules_rates_are_those_given_by_hand() {
    let mesh: Mesh = "tp=2,cp=2,dp=2".parse().unwrap();
    let ranks = loopback::spawn(8, |world: Arc<dyn Communicator>| {
        let (model, at) = (model(F32), mesh.coordinate(world.rank()).unwrap());
        let schedule = options(2).schedule.unwrap();
        let new = |options| {
            Optimizer::new(Arc::clone(&world), mesh.clone(), &model, AdamW::default(), fill, options).unwrap()
        };
        let mut by_hand = new(Options { schedule: None, ..options(2) });
        let mut scheduled = new(options(2));
        scheduled.restore_steps(1).unwrap();
        by_hand.restore_steps(1).unwrap();
        for step in 1..7 {
            let now = StepArgs { max_norm: Some(3.0), ..scheduled.scheduled().unwrap() };
            assert_eq!(now.lr.to_bits(), schedule.at(step).to_bits());
            let outcomes = [(&mut scheduled, now), (&mut by_hand, StepArgs { lr: schedule.at(step), ..now })]
                .map(|(opt, now)| {
                    let mb = opt.micro_batch(1).unwrap();
                    for p in model.parameters() {
                        let mut grads = gradient(p, &mesh, &at, step as usize);
                        if step == 3 && world.rank() == 5 {
                            grads[0] = f32::NAN;
                        }
                        mb.grad(&p.name, &grads[..]).unwrap();
                    }
                    mb.finish().unwrap();
                    opt.step(now).unwrap().outcome().unwrap()
                });
            assert!(outcomes.iter().all(|o| matches!(o, Outcome::Skipped { .. }) == (step == 3)), "{step}");
            for p in model.parameters() {
                let of = |opt: &Optimizer| values(opt, &p.name);
                assert_eq!(of(&scheduled), of(&by_hand), "{} after step {step}", p.name);
            }
        }
        scheduled.optimizer().steps()
    });
    assert_eq!(ranks.unwrap(), [7; 8]);
}
