//! Workers that verify while they train: values written by an exchange, a roll-back or a takeover count as written.

use crate::equal::run;
use crate::replicas::step;
use meshstep_comm::loopback;
use meshstep_local::{LocalOptimizer, LocalPlan, OnFailure, Workers};
use meshstep_shard::{Error, Fault, Stage, Step, StepArgs};

/// A plan with a flight after five steps, which is rolled back when given up.
fn plan() -> LocalPlan {
    LocalPlan::local_adam(4).with(|f| {
        (f.timing.delay, f.on_failure) = (2, OnFailure::RollBack);
    })
}

#[test]
fn what_is_exchanged_rolled_back_or_taken_over_is_what_ranks_wrote() {
    // A third worker joins, or the same two regroup.
    for (stage, ranks) in
        [Stage::Zero1, Stage::Zero2, Stage::Zero3].into_iter().flat_map(|s| [(s, 6), (s, 4)])
    {
        let run = run(2, 2).stage(stage);
        let kept = loopback::spawn(ranks, |world| {
            let worker = world.rank() / 2;
            // Two workers, and a third that is alone until it joins.
            let there = world.split(Some(u32::from(worker == 2)), 0).unwrap().unwrap();
            let (comm, workers) = Workers::split(there, worker as u32).unwrap();
            let inside = comm.rank();
            let mut local = LocalOptimizer::new(run.build(comm).unwrap(), workers, plan()).unwrap();
            local.verify_every(1).unwrap();
            let steps = if worker == 2 { 2 } else { 5 };
            for _ in 0..steps {
                let _ = step(&run, &mut local, worker).unwrap();
            }
            if worker == 2 {
                local.enter();
            }
            let across = world.split(Some(inside as u32), worker as i64).unwrap().unwrap();
            local.regroup(Workers { world, across }).unwrap();
            let given_up = (0..8).map(|_| step(&run, &mut local, worker).unwrap().exchanged.given_up.len());
            assert_eq!(given_up.collect::<Vec<_>>(), [if worker == 2 { 0 } else { 3 }, 0, 0, 0, 0, 0, 0, 0]);
            let verified = local.verify().unwrap();
            assert_eq!(verified.unchecked, 0);
            verified.kept
        });
        // Moments that only one rank has were compared with the values it wrote.
        assert!(kept.unwrap().into_iter().all(|kept| kept > 0), "{stage:?}, {ranks}");
    }
}

/// A worker that cannot take its step rolls back with the others.
#[test]
fn a_step_in_error_is_no_reason_to_suspect_what_was_rolled_back() {
    let run = run(2, 2).stage(Stage::Zero1);
    let plan = LocalPlan::local_adam(2).with(|f| f.on_failure = OnFailure::RollBack);
    let kept = loopback::spawn(4, |world| {
        let worker = world.rank() / 2;
        let (comm, workers) = Workers::split(world, worker as u32).unwrap();
        let mut local = LocalOptimizer::new(run.build(comm).unwrap(), workers, plan.clone()).unwrap();
        local.verify_every(1).unwrap();
        for t in 0..8 {
            if (worker, t) != (1, 3) {
                let _ = step(&run, &mut local, worker).unwrap();
                continue;
            }
            local.micro_batch(1).unwrap().finish().unwrap();
            let told = local.step(StepArgs { lr: 0.1, ..StepArgs::default() }).unwrap_err();
            let meshstep_local::LocalError::Shard(Error::Fault { fault, .. }) = &told else {
                panic!("{told}")
            };
            assert!(matches!(fault, Fault::MissingGradient { .. }), "{told}");
        }
        let verified = local.verify().unwrap();
        assert_eq!(verified.unchecked, 0);
        verified.kept
    });
    assert!(kept.unwrap().into_iter().all(|kept| kept > 0));
}
