//! Results that arrive later, and workers that are lost.

use super::{Does, LEN, broken, failed, first, layout, propagate, train, worker};
use meshstep_comm::loopback;
use meshstep_local::{Exchanged, LocalError, LocalOptimizer, LocalPlan, OnFailure, Veto, Workers};
use meshstep_optim::Sgd;
use meshstep_shard::{Error, Optimizer, Options, Step, StepArgs};
use std::sync::Arc;

#[test]
fn without_the_others_a_worker_hears_of_it_and_goes_on() {
    let does = |rank: usize, step| match rank {
        3 if step == 4 => Does::Leaves,
        2 if step == 4 => Does::Leaves,
        _ => Does::Grad(worker(rank), 1),
    };
    let plan = LocalPlan::local_sgd(3).with(|f| f.on_failure = OnFailure::RollBack);
    let ends = train(2, &Sgd::default().into(), &Options::default(), &plan, 8, does);
    assert_eq!(ends[2].len(), 4);
    for end in &ends[..2] {
        let x = |step: usize| end[step].1.params[0];
        assert!(matches!(end[5].0, Err(LocalError::Workers { .. })), "{:?}", end[5].0);
        // Back to the exchange of step 2, then steps of the worker alone.
        assert_eq!([x(2), x(5), x(6), x(7)], [-2.25, -2.25, -2.75, -3.25]);
        assert!(end[6].0.is_ok() && end[7].0.is_ok());
    }
}

#[test]
fn what_was_sent_and_is_not_finite_fails_where_it_arrives() {
    let plan = LocalPlan::local_sgd(3).with(|f| {
        f.timing.delay = 2;
        f.on_failure = OnFailure::RollBack;
    });
    let ends = train(2, &Sgd::default().into(), &propagate(), &plan, 9, broken);
    for end in &ends {
        let sent: Vec<usize> = (0..9).filter(|&i| end[i].0.as_ref().unwrap().exchanged.sent == [0]).collect();
        assert_eq!(sent, [2, 5, 8]);
        assert_eq!(failed(&end[4].0), [(0, Veto::NotFinite { rank: 0 })]);
        assert_eq!(end[4].1.params[0], 0.0);
        assert_eq!(end[7].0.as_ref().unwrap().exchanged.merged, [0]);
    }
    // From 0 after step 4: one step each, sent; then the mean of it, and two steps alone.
    assert_eq!([0, 2].map(|rank| ends[rank][7].1.params[0]), [-0.75 - 1.0, -0.75 - 2.0]);
}

#[test]
fn what_is_sent_again_and_late_is_not_sent_twice() {
    let plan = LocalPlan::local_sgd(3).with(|f| (f.timing.delay, f.on_failure) = (2, OnFailure::Retry));
    let does = |rank: usize, step| match (rank, step) {
        (1, 2 | 3) => Does::Nothing,
        _ => Does::Grad(worker(rank), 1),
    };
    let ends = train(2, &Sgd::default().into(), &Options::default(), &plan, 12, does);
    for end in &ends[2..] {
        let steps = |of: fn(&Exchanged) -> bool| -> Vec<usize> {
            (0..12).filter(|&i| of(&end[i].0.as_ref().unwrap().exchanged)).collect()
        };
        assert_eq!(steps(|e| e.failed == [(0, Veto::Fault { rank: 0 })]), [2, 3]);
        assert_eq!(steps(|e| e.sent == [0]), [4, 8, 11]);
        assert_eq!(steps(|e| e.merged == [0]), [6, 10]);
    }
}

#[test]
fn nobody_waits_for_a_worker_that_has_lost_a_rank() {
    let told = std::sync::Barrier::new(4);
    let ends = loopback::spawn(4, |world| {
        let rank = world.rank();
        let (comm, between) = Workers::split(world, rank as u32 / 2).unwrap();
        let options = Options::default();
        let inner = Optimizer::new(Arc::clone(&comm), layout(), Sgd::default(), first, options).unwrap();
        let mut local = LocalOptimizer::new(inner, between, LocalPlan::local_sgd(2)).unwrap();
        if rank == 3 {
            comm.abort();
            told.wait();
            return None;
        }
        let mut step = || {
            let mb = local.micro_batch(1)?;
            mb.grad("x", &[1.0f32; LEN][..])?;
            mb.finish()?;
            local.step(StepArgs { lr: 0.5, ..StepArgs::default() })
        };
        let error = [step(), step()].into_iter().find_map(Result::err);
        // The worker's ranks stay until the others have noticed.
        told.wait();
        error
    });
    let ends = ends.unwrap();
    assert!(matches!(ends[0], Some(LocalError::Workers { .. })), "{ends:?}");
    assert!(matches!(ends[1], Some(LocalError::Workers { .. })), "{ends:?}");
    assert!(matches!(ends[2], Some(LocalError::Shard(Error::Comm(_)))), "{ends:?}");
}
