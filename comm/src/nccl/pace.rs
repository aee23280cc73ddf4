//! The pace of a loop that asks the device or NCCL whether a call is done.

use std::thread;
use std::time::{Duration, Instant};

/// How long a loop sleeps between two questions, once it has spun.
const SLEEP: Duration = Duration::from_micros(50);
/// How long a loop spins before it sleeps: as long as one sleep takes, so that it costs at most twice the shorter of the two.
const SPIN: Duration = SLEEP;

/// Paces one loop, from its first question on.
#[derive(Debug)]
pub(super) struct Pace {
    begun: Instant,
}

impl Pace {
    pub(super) fn new() -> Self {
        Pace { begun: Instant::now() }
    }

    /// Returns when the loop is to ask again.
    pub(super) fn pause(&self) {
        match pause(self.begun.elapsed()) {
            // The thread that works for NCCL may need this core.
            None => thread::yield_now(),
            Some(sleep) => thread::sleep(sleep),
        }
    }
}

/// The sleep of a loop that has asked for so long; none while it spins.
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
