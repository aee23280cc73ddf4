//! Two processes that meet in a store create another communicator after each failure.

use crate::nccl::bench::{Rank, alone, options, stand_in};
use crate::nccl::pair::{deadline, finish};
use meshstep_comm::nccl::Job;
use meshstep_comm::{Communicator as _, Error, Op};
use meshstep_tensor::Queue;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Failures, one for each communicator; the last has none.
#[derive(Clone, Copy, Debug)]
enum Failure {
    /// Rank 1 misses a sum.
    Late,
    /// Rank 1 gives up.
    Aborts,
}

pub(super) fn rebuilds(rank: usize) {
    // One rank gets its error some time before the other, and waits for it in the next communicator.
    let options = options(4 * deadline());
    let job = Job::from_env(options).unwrap();
    for failure in [Failure::Late, Failure::Aborts, Failure::Late] {
        let rank = Rank::new(Arc::new(job.communicator().unwrap()));
        assert_eq!(rank.sum(1.0), Ok(2.0), "before {failure:?}");
        fail(&rank, failure);
        assert_eq!(rank.meter.live_total(), 0);
    }
    let last = Rank::new(Arc::new(job.communicator().unwrap()));
    assert_eq!(last.sum(1.0 + rank as f32), Ok(3.0));
}

/// Both ranks have an error with the failed rank.
fn fail(rank: &Rank, failure: Failure) {
    match (rank.comm.rank(), failure) {
        (0, Failure::Late) => {
            let begun = Instant::now();
            let op = Op::barrier().within(deadline());
            let started = rank.comm.start(op, rank.buffer(&[0f32; 0]), &rank.queue).unwrap();
            let (_, result) = started.wait(&Queue::cpu());
            assert!(matches!(result, Err(Error::Stuck { .. })), "{result:?}");
            assert!(begun.elapsed() < deadline() + Duration::from_secs(2));
        }
        (_, Failure::Late) => assert_heard(rank, 0),
        (0, Failure::Aborts) => {
            // The abort may arrive while this rank still waits for the sum.
            drop(rank.sum(1.0));
            assert_heard(rank, 1);
        }
        (_, Failure::Aborts) => {
            // The end of this second sum means that the first is done on both ranks.
            assert_eq!(rank.sum(1.0), Ok(2.0));
            rank.comm.abort();
            assert_eq!(rank.comm.sound(), Err(Error::Aborted { rank: 1 }));
        }
    }
}

/// Checks that the failure is rank `failed`'s. NCCL may notice by itself that the other rank is gone; the stand-in does not.
fn assert_heard(rank: &Rank, failed: usize) {
    let error = heard(rank);
    let noticed = matches!(error, Error::Nccl { .. }) && !stand_in(1);
    assert!(matches!(error, Error::Remote { rank, .. } if rank == failed) || noticed, "{error:?}");
}

/// Waits for the other rank's failure without an operation of this rank.
fn heard(rank: &Rank) -> Error {
    let begun = Instant::now();
    loop {
        if let Err(error) = rank.comm.sound() {
            return error.cause().clone();
        }
        assert!(begun.elapsed() < 3 * deadline(), "no failure arrived");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn two_processes_build_communicators_again_after_failures() {
    let _alone = alone();
    finish("rebuilds", &[]);
}
