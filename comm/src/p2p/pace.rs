//! Progress of a transfer against its deadline.

use std::time::{Duration, Instant};

/// Time without progress after which a transfer that has passed its deadline fails.
pub(super) const STALL: Duration = Duration::from_millis(400);
/// Time after which a transfer that has passed its deadline fails although bytes still trickle in.
const OVERRUN: Duration = Duration::from_millis(500);

/// Progress of a transfer.
#[derive(Debug)]
pub(super) struct Pace {
    moved: Instant,
    /// First look at the clock after the deadline.
    overdue: Option<Instant>,
}

impl Pace {
    pub(super) fn start() -> Self {
        Pace { moved: Instant::now(), overdue: None }
    }

    /// Notes a turn.
    pub(super) fn note(&mut self, moved: bool) {
        if moved {
            self.moved = Instant::now();
        }
    }

    pub(super) fn stands_still(&self) -> bool {
        self.moved.elapsed() >= STALL
    }

    /// Returns true if the transfer may not go on after its deadline.
    pub(super) fn is_over(&mut self) -> bool {
        self.overdue.get_or_insert_with(Instant::now).elapsed() >= OVERRUN || self.stands_still()
    }
}
