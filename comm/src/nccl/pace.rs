//! Pacing of a loop that polls the device or NCCL.

use std::thread;
use std::time::{Duration, Instant};

/// Sleep between two polls, after the spinning phase.
const SLEEP: Duration = Duration::from_micros(50);
/// Duration of the spinning phase: as long as one sleep takes, so that the loop costs at most twice the shorter of the two.
const SPIN: Duration = SLEEP;

/// Pace of one loop, from its first poll on.
#[derive(Debug)]
pub(super) struct Pace {
    begun: Instant,
}

impl Pace {
    pub(super) fn new() -> Self {
        Pace { begun: Instant::now() }
    }

    /// Pauses until the next poll.
    pub(super) fn pause(&self) {
        match pause(self.begun.elapsed()) {
            // NCCL's worker thread may need this core.
            None => thread::yield_now(),
            Some(sleep) => thread::sleep(sleep),
        }
    }
}

/// Returns the sleep of a loop after this polling time; `None` while it spins.
fn pause(asked: Duration) -> Option<Duration> {
    (asked >= SPIN).then_some(SLEEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_spins_first_and_sleeps_then() {
        let micros = Duration::from_micros;
        assert_eq!([micros(0), micros(49)].map(pause), [None; 2]);
        assert_eq!([micros(50), micros(1_000_000)].map(pause), [Some(SLEEP); 2]);
    }
}
