//! Ranks that step with different arguments, errors that no caller has read, and waits of the host.

use super::{alone, devices, room_for};
use crate::common::{Run, STAGES};
use meshstep_comm::{Communicator, nccl};
use meshstep_shard::{Error, Missing, Optimizer, Options, Outcome, StepArgs};
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::{self, Stream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

#[test]
fn ranks_that_step_with_different_things_are_told() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let run = Run { ranks: 2, ..Run::default() };
    let told = nccl::spawn(&[0, 1 % devices()], nccl::Options::default(), |comm| {
        let rank = comm.rank();
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
        let mut optimizer = run.build(comm).unwrap();
        let before = crate::common::params(&optimizer);
        run.hand_over(&mut optimizer, 1, 0).unwrap();
        let at = StepArgs { lr: 0.1 + rank as f64, ..StepArgs::default() };
        let told = optimizer.step(at).unwrap().outcome().unwrap_err().to_string();
        assert_eq!(crate::common::params(&optimizer), before);
        run.hand_over(&mut optimizer, 2, 0).unwrap();
        assert!(matches!(optimizer.step(run.at(2)).unwrap().outcome().unwrap(), Outcome::Applied { .. }));
        told
    });
    let one = |mine| {
        format!(
            "ranks disagree on lr: this rank has {mine}, the ranks have 0.1 to 1.1; give every rank the same value"
        )
    };
    assert_eq!(told.unwrap(), [one(0.1), one(1.1)]);
}

/// A step finds hyperparameters that have changed on one rank.
#[test]
fn ranks_with_other_hyperparameters_are_told() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let run = Run { ranks: 2, ..Run::default() };
    let told = nccl::spawn(&[0, 1 % devices()], nccl::Options::default(), |comm| {
        let (rank, queue) = (comm.rank(), Queue::cuda(Stream::new(comm.device()).unwrap()));
        let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
        let beta1 = Arc::new(AtomicU64::new(0.9f64.to_bits()));
        let rule = crate::common::elsewhere::Elsewhere { beta1: Arc::clone(&beta1), kernels: true };
        let mut optimizer =
            Optimizer::new(comm, run.layout(), rule, |_, _| Ok(()), run.options.clone()).unwrap();
        let mut step = |t| {
            run.hand_over(&mut optimizer, t, 0).unwrap();
            optimizer.step(run.at(t)).unwrap().outcome()
        };
        step(1).unwrap();
        beta1.fetch_xor(rank as u64, SeqCst);
        let told = step(2).unwrap_err();
        beta1.fetch_xor(rank as u64, SeqCst);
        step(2).unwrap();
        matches!(told, Error::Differ { field: "hyperparameters", .. })
    });
    assert_eq!(told.unwrap(), [true; 2]);
}

#[test]
fn an_error_that_nobody_asked_for_is_told_by_a_later_step() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let run = Run { ranks: 2, ..Run::default() };
    nccl::spawn(&[0, 1 % devices()], nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let run = Run { options: Options { queue: queue.clone(), ..run.options.clone() }, ..run.clone() };
        let mut optimizer = run.build(comm).unwrap();
        run.hand_over(&mut optimizer, 1, 0).unwrap();
        drop(optimizer.step(StepArgs { lr: -1.0, ..StepArgs::default() }).unwrap());
        queue.synchronize().unwrap();
        run.hand_over(&mut optimizer, 2, 0).unwrap();
        let told = optimizer.step(run.at(2)).unwrap_err().to_string();
        assert!(told.contains("lr"), "{told}");
        // The step was taken nevertheless, and an error is returned once only.
        assert!(crate::common::state(&optimizer).iter().all(|(t, _)| *t == 1));
        run.hand_over(&mut optimizer, 3, 0).unwrap();
        optimizer.step(run.at(3)).unwrap().outcome().unwrap();
    })
    .unwrap();
}

#[test]
fn the_host_waits_for_nothing() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    let policies = [Missing::SkipIfMissingEverywhere, Missing::AllOrNone].into_iter().cycle();
    let all = STAGES.into_iter().zip(policies);
    for (stage, missing) in STAGES.map(|stage| (stage, Missing::Error)).into_iter().chain(all) {
        let options = Options { missing, ..Run::default().options };
        let run = Run { ranks: 1, in_place: true, options, ..Run::default() }.stage(stage);
        let waits = nccl::spawn(&[0], nccl::Options::default(), |comm| {
            let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
            let run = Run { options: Options { queue: queue.clone(), ..run.options.clone() }, ..run.clone() };
            let mut optimizer = run.build(comm).unwrap();
            let mut waits = Vec::new();
            for t in 1..=8 {
                let batch = optimizer.micro_batch(1).unwrap();
                // The caller's own kernels would fill the slots. Order of a backward pass, with gradients missing in the last
                // buckets only, so that the pool does not grow: freeing what it grows by waits.
                let left_alone = |i: usize| missing != Missing::Error && i < 2 && (t + i).is_multiple_of(2);
                for i in (0..run.lens.len()).rev().filter(|&i| !left_alone(i)) {
                    batch.slot(&crate::common::name(i)).unwrap().fill().unwrap();
                }
                batch.finish().unwrap();
                let before = cuda::waits();
                let pending = optimizer.step(run.at(t as u64)).unwrap();
                waits.push(cuda::waits() - before);
                // Only reading an outcome waits.
                if t < 5 {
                    pending.outcome().unwrap();
                }
            }
            waits
        });
        // The first step builds its tables.
        assert_eq!(waits.unwrap()[0][1..], [0; 7], "{stage:?} {missing:?}");
    }
}
