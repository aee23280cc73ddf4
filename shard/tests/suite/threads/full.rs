//! Rayon's global pool is full of long jobs: no rank's step waits for them.

use super::{LENS, Steps, iterate, lbfgs, run};
use meshstep_cases::occupied::while_rayon_is_full;
use meshstep_shard::Stage;
use meshstep_tensor::Threads;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_millis(10);
const ROUNDS: usize = 5;
const TURNS: usize = 4;

/// Returns the times of the rounds after the first, which starts threads.
fn times(mut round: impl FnMut()) -> Vec<Duration> {
    let one = |_| {
        let start = Instant::now();
        round();
        start.elapsed()
    };
    (0..=ROUNDS).map(one).skip(1).collect()
}

/// Compares the time of the shortest step on any rank with and without a full pool: other work of the machine lengthens some steps, a
/// wait for the pool all of them.
fn check(
    what: &str,
    ranks: usize,
    of_rank: impl Fn(Arc<dyn meshstep_comm::Communicator>) -> Vec<Duration> + Sync,
) {
    let shortest =
        || meshstep_comm::loopback::spawn(ranks, &of_rank).unwrap().concat().into_iter().min().unwrap();
    // In turns, so that both meet the same other work; and one test after the other.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let turns: Vec<_> = (0..TURNS).map(|_| [shortest(), while_rayon_is_full(shortest)]).collect();
    let [free, full] = [0, 1].map(|which| turns.iter().map(|turn| turn[which]).min().unwrap());
    assert!(
        full.saturating_sub(free) < LIMIT,
        "{what} on {ranks} ranks: {free:?}, {full:?} with a full pool"
    );
}

#[test]
fn steps_and_verifications_wait_for_nobody() {
    for (ranks, stage) in [(1, Stage::Replicated), (4, Stage::Zero1), (2, Stage::Zero2)] {
        check("steps", ranks, |comm| {
            let mut steps = Steps::new(&run(stage, ranks, &Threads::shared()), comm);
            times(|| steps.step())
        });
    }
}

#[test]
fn steps_of_lbfgs_wait_for_nobody() {
    for ranks in [1, 4] {
        check("L-BFGS", ranks, |comm| {
            let (mut opt, mut grad) = (lbfgs(comm, &Threads::shared()), vec![0.0; LENS[0]]);
            times(|| iterate(&mut opt, &mut grad))
        });
    }
}
