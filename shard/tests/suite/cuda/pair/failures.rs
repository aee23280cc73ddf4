//! A process dies, sleeps or gives up: the other gets a typed error in time, and takes no further step.

use crate::common::{Gradients, Run};
use crate::cuda::pair::{Process, Rank, finish, ready, ready_pair};
use crate::cuda::verify::take;
use crate::cuda::{alone, stand_in};
use meshstep_comm::Error as CommError;
use meshstep_shard::{Error, Optimizer, Stage};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time after a deadline until a rank has its error.
const GRACE: Duration = Duration::from_secs(3);

/// Deadline of each operation. The first operations of a real NCCL connect the ranks, which takes longer.
pub(super) fn deadline() -> Duration {
    Duration::from_secs(if stand_in() { 1 } else { 5 })
}

fn run(stage: Stage) -> Run {
    Run { ranks: 2, gradients: Gradients::Grid, ..Run::default() }.stage(stage)
}

/// Builds an optimizer on this rank's GPU and takes two steps.
fn stepped(rank: &Rank, run: &Run) -> Optimizer {
    let mut opt = run.build(rank.comm()).unwrap();
    (1..=2).for_each(|t| take(run, &mut opt, t).unwrap());
    opt
}

/// Steps until one fails, in time. Every later step fails with the same cause.
fn until_failure(run: &Run, opt: &mut Optimizer) -> CommError {
    let mut t = 3;
    let (told, after) = loop {
        let begun = Instant::now();
        match take(run, opt, t) {
            Ok(()) => t += 1,
            Err(error) => break (cause(error), begun.elapsed()),
        }
    };
    assert!(after < deadline() + GRACE, "{told:?} after {after:?}");
    let later = cause(take(run, opt, t).unwrap_err());
    assert_eq!(later, told);
    told
}

/// Returns the first failure of the communicator.
fn cause(error: Error) -> CommError {
    let Error::Comm(error) = error else { panic!("no error of the communicator: {error:?}") };
    error.cause().clone()
}

/// Checks the error of a rank with a lost peer. NCCL may notice that by itself; the stand-in does not.
fn assert_left_alone(error: &CommError) {
    let noticed = matches!(error, CommError::Nccl { .. }) && !stand_in();
    assert!(matches!(error, CommError::Stuck { .. }) || noticed, "{error:?}");
}

pub(super) fn steps_until_failure(rank: &Rank) {
    let run = rank.on_gpu(&run(Stage::Zero2));
    let mut opt = stepped(rank, &run);
    ready(rank.number());
    assert_left_alone(&until_failure(&run, &mut opt));
}

/// Rank 1 reaches its third step after the other's deadline.
pub(super) fn sleeps(rank: &Rank) {
    let run = rank.on_gpu(&run(Stage::Zero1));
    let mut opt = stepped(rank, &run);
    if rank.number() == 1 {
        sleep(2 * deadline());
    }
    assert_left_alone(&until_failure(&run, &mut opt));
}

/// Rank 1 gives up after its second step.
pub(super) fn aborts(rank: &Rank) {
    let run = rank.on_gpu(&run(Stage::Zero3));
    let mut opt = stepped(rank, &run);
    ready(rank.number());
    if rank.number() == 0 {
        return assert_left_alone(&until_failure(&run, &mut opt));
    }
    rank.comm().abort();
    assert_eq!(until_failure(&run, &mut opt), CommError::Aborted { rank: 1 });
}

#[test]
fn a_process_that_is_killed_is_an_error_in_the_other() {
    let _alone = alone();
    let Some([first, mut second]) = ready_pair("steps until failure") else { return };
    second.kill();
    let (well, said) = first.end();
    assert!(well, "{said}");
    assert!(!second.end().0);
}

#[test]
fn a_process_that_comes_too_late_is_an_error_in_both() {
    let _alone = alone();
    finish("sleeps", &[]);
}

#[test]
fn a_process_that_aborts_is_an_error_in_the_other() {
    let _alone = alone();
    let Some(processes) = ready_pair("aborts") else { return };
    for (well, said) in processes.map(Process::end) {
        assert!(well, "{said}");
    }
}
