//! Aborts of groups, panics, and ranks that leave.

use super::{DEADLINE, GRACE};
use crate::nccl::bench::{Rank, alone, available, comms, options, patient, plan, ranks, stand_in};
use meshstep_comm::nccl::{self, LastResort, Options};
use meshstep_comm::{Communicator, Error, Op, Reduction};
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{Buffer, Category, Meter, Queue};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Each rank is in a pair, and in a group of its own that was split from the pair.
#[test]
fn abort_ends_a_group_and_its_subgroups_and_no_ancestor() {
    let _alone = alone();
    if !available(4) {
        return;
    }
    let together = Barrier::new(4);
    for (aborts, rank_below) in [(3, 3), (2, 0)] {
        let above = aborts == 2;
        let ends = ranks(4, &patient(), |comm| {
            let rank = Rank::new(comm);
            let me = rank.comm.rank();
            let pair = rank.comm.split(Some(me as u32 / 2), 0).unwrap().unwrap();
            let own = pair.split(Some(me as u32), 0).unwrap().unwrap();
            together.wait();
            if me == aborts {
                if above { pair.abort() } else { rank.comm.abort() }
            }
            together.wait();
            let sum = |comm: &dyn Communicator| {
                let mut buffer = rank.buffer(&[2f32]);
                comm.all_reduce(&mut buffer, Reduction::Sum).map(|()| rank.read::<f32>(&buffer)[0])
            };
            [rank.dyn_comm(), &*pair, &*own].map(sum)
        });
        let aborted = Err(Error::Aborted { rank: rank_below });
        for (rank, end) in ends.into_iter().enumerate() {
            let expected = match (above, rank) {
                (false, _) => [aborted.clone(), aborted.clone(), aborted.clone()],
                (true, 2 | 3) => [Ok(8.0), aborted.clone(), aborted.clone()],
                (true, _) => [Ok(8.0), Ok(4.0), Ok(2.0)],
            };
            assert_eq!(end, expected, "rank {rank}, the pair alone: {above}");
        }
    }
}

/// A panic ends one group alone; groups split from it continue until a rank aborts that group.
#[test]
fn an_abort_of_a_failed_group_ends_its_subgroups() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    let together = Barrier::new(2);
    let ends = ranks(2, &patient(), |comm| {
        let pair = comm.split(Some(0), 0).unwrap().unwrap();
        together.wait();
        let mut kept = Some(comm);
        if pair.rank() == 0 {
            let comm = kept.take();
            let unwinds = move || {
                let _comm = comm;
                std::panic::resume_unwind(Box::new("out of luck"));
            };
            std::thread::spawn(unwinds).join().unwrap_err();
        }
        together.wait();
        pair.barrier().unwrap();
        // No rank aborts a group that another still waits in.
        together.wait();
        if let Some(comm) = kept {
            assert!(matches!(comm.sound(), Err(Error::Panicked { rank: 0, .. })));
            comm.abort();
        }
        together.wait();
        pair.barrier()
    });
    assert_eq!(ends, vec![Err(Error::Aborted { rank: 1 }); 2]);
}

#[test]
fn a_panic_ends_the_others_operations() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    // Enough repetitions that in some of them a rank has not joined when the other panics.
    (0..20).for_each(|_| one_panic());
}

fn one_panic() {
    let seen = Mutex::new(Vec::new());
    let result = nccl::spawn(&[0, 1], patient(), |comm| {
        let rank = Rank::new(comm);
        if rank.comm.rank() == 1 {
            std::panic::resume_unwind(Box::new("out of luck"));
        }
        seen.lock().unwrap().push(rank.sum(1.0).unwrap_err().cause().clone());
    });
    assert_eq!(result.unwrap_err(), Error::Panicked { rank: 1, message: "out of luck".to_owned() });
    let message = "its communicator was dropped while its thread unwound".to_owned();
    let panicked = Error::Panicked { rank: 1, message };
    // Rank 0 may not even have joined yet.
    assert!(seen.into_inner().unwrap().iter().all(|error| *error == panicked));
}

#[test]
fn an_abort_that_does_not_end_is_for_the_last_resort() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    plan("hang 1 0");
    plan("abort 1500");
    let calls: Arc<Mutex<Vec<Error>>> = Arc::default();
    let noted = Arc::clone(&calls);
    let last_resort = LastResort::new(move |cause| noted.lock().unwrap().push(cause.clone()));
    let abort_within = Duration::from_millis(100);
    let options = Options { abort_within, last_resort, ..options(DEADLINE) };
    let begun = Instant::now();
    ranks(2, &options, |comm| {
        let rank = Rank::new(comm);
        let error = rank.sum(1.0).unwrap_err();
        assert!(matches!(error, Error::Stuck { .. }), "{error:?}");
    });
    // If the last resort returns, buffers are kept until NCCL has released them after all.
    assert!(begun.elapsed() >= Duration::from_millis(1000));
    let calls = calls.lock().unwrap();
    assert!(matches!(calls[..], [Error::Stuck { .. }]), "{calls:?}");
}

/// NCCL returns from a destroy or an abort before it is done; the handle's end waits for its threads.
#[test]
fn a_destroy_and_an_abort_that_go_on_are_waited_for() {
    let _alone = alone();
    if !stand_in(2) || nccl::probe().unwrap().version < 21_400 {
        return;
    }
    for fails in [false, true] {
        let begun = Instant::now();
        if fails {
            plan("hang 1 0");
        }
        plan("async 150");
        ranks(2, &options(DEADLINE), |comm| assert_eq!(Rank::new(comm).sum(1.0).is_err(), fails));
        assert_eq!(comms(), 0, "fails: {fails}");
        assert!(begun.elapsed() >= Duration::from_millis(150));
        plan("async 0");
    }
}

/// An end that exceeds its limit calls the last resort.
#[test]
fn an_abort_that_goes_on_too_long_is_for_the_last_resort() {
    let _alone = alone();
    if !stand_in(2) || nccl::probe().unwrap().version < 21_400 {
        return;
    }
    plan("hang 1 0");
    plan("async 1500");
    let calls: Arc<Mutex<Vec<Error>>> = Arc::default();
    let noted = Arc::clone(&calls);
    let last_resort = LastResort::new(move |cause| noted.lock().unwrap().push(cause.clone()));
    let options = Options { abort_within: Duration::from_millis(100), last_resort, ..options(DEADLINE) };
    ranks(2, &options, |comm| assert!(Rank::new(comm).sum(1.0).is_err()));
    plan("async 0");
    let calls = calls.lock().unwrap();
    assert!(matches!(calls[..], [Error::Stuck { .. }]), "{calls:?}");
}

/// A free of device memory waits for the stuck operation, and holds the context meanwhile. The operation before the stuck one ends
/// within the free, so that the watchdog has an event of it to give up.
#[test]
fn a_stuck_operation_is_found_while_a_free_of_memory_waits_for_it() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    plan("hang 1 1");
    let (begun, host) = (Instant::now(), Queue::cpu());
    ranks(2, &options(DEADLINE), |comm| {
        let rank = Rank::new(comm);
        let start = || rank.comm.start(Op::all_reduce(Reduction::Sum), rank.buffer(&[1f32]), &rank.queue);
        let (spare, first, second) = (rank.buffer(&[1f32]), start().unwrap(), start().unwrap());
        let (_, result) = thread::scope(|scope| {
            scope.spawn(|| drop(spare));
            thread::sleep(DEADLINE / 8);
            drop(first);
            // The host waits, or the rank's stream, in a call of the driver.
            second.wait(if rank.comm.rank() == 0 { &host } else { &rank.queue })
        });
        let error = result.and_then(|()| rank.comm.sound()).unwrap_err();
        assert!(matches!(error.cause(), Error::Stuck { .. }), "{error:?}");
    });
    assert!(begun.elapsed() < DEADLINE + GRACE, "{:?}", begun.elapsed());
}

#[test]
fn a_rank_that_leaves_does_not_take_the_others_results() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    let results = ranks(2, &patient(), |comm| {
        let stream = Stream::new(comm.device()).unwrap();
        let queue = Queue::cuda(stream);
        let mut buffer =
            Buffer::zeroed_on(&queue, 4, meshstep_tensor::DType::F32, &Meter::new(), Category::Grads)
                .unwrap();
        queue.upload([1f32; 4][..].into(), buffer.as_mut()).unwrap();
        let started = comm.start(Op::all_reduce(Reduction::Sum), buffer, &queue).unwrap();
        // Started operations complete.
        drop(comm);
        let (buffer, result) = started.wait(&queue);
        let mut values = [0f32; 4];
        queue.download(buffer.as_slice(), (&mut values[..]).into()).unwrap();
        result.map(|()| values)
    });
    assert_eq!(results, [Ok([2.0; 4]), Ok([2.0; 4])]);
}
