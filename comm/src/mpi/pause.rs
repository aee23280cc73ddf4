//! Pauses between two polls: short ones first, so that neither latency nor other processes' cores suffer.

use std::thread;
use std::time::{Duration, Instant};

/// Time during which a pause only yields the core.
const YIELDING: Duration = Duration::from_micros(200);
/// Pause after that.
const NAP: Duration = Duration::from_micros(50);

/// Wait that polls.
#[derive(Debug)]
pub(super) struct Pause {
    began: Instant,
}

impl Pause {
    pub(super) fn begin() -> Self {
        Pause { began: Instant::now() }
    }

    /// Pauses once; returns false instead if the wait has taken `at_most`.
    pub(super) fn once(&self, at_most: Duration) -> bool {
        let took = self.began.elapsed();
        if took >= at_most {
            return false;
        }
        if took < YIELDING {
            thread::yield_now();
        } else {
            thread::sleep(NAP.min(at_most - took));
        }
        true
    }
}
