//! Wait budget of a rank for buckets in flight.
//!
//! A rank that lacks a gradient sends its bucket only at the end of its micro-batch. Suppose that before its end it waits for
//! another rank, in a collective of the model or in a gather, and that the other rank waits for the bucket: then neither
//! continues. The ranks cannot detect this, because only the bucket's arrival shows what other ranks have sent. Every wait is
//! therefore limited, and a rank then takes memory beyond the plan. A vain wait in one micro-batch is likely to repeat in the
//! next, so the budget shrinks after it. A bucket that arrives before this rank's own micro-batch ends was merely slow and did
//! not wait for this rank, so the budget grows again.

use std::time::Duration;

/// Number of halvings after which a wait is shortest.
const HALVINGS: u32 = 10;

/// Wait budget that is left.
#[derive(Debug)]
pub(crate) struct WaitBudget {
    whole: Duration,
    /// Number of halvings.
    halvings: u32,
    /// Bucket for which this micro-batch has waited in vain.
    spent: Option<usize>,
}

impl WaitBudget {
    /// Makes a full budget.
    pub(crate) fn new(whole: Duration) -> Self {
        WaitBudget { whole, halvings: 0, spent: None }
    }

    /// Begins a micro-batch: halves the budget after a micro-batch with a vain wait, else doubles it up to the full budget.
    pub(crate) fn begin(&mut self) {
        self.halvings = if self.spent.is_some() {
            HALVINGS.min(self.halvings + 1)
        } else {
            self.halvings.saturating_sub(1)
        };
        self.spent = None;
    }

    /// Returns the time to wait: zero in a micro-batch that has waited in vain.
    pub(crate) fn left(&self) -> Duration {
        if self.spent.is_some() { Duration::ZERO } else { self.whole / (1 << self.halvings) }
    }

    /// Records that a wait for bucket `b` was in vain.
    pub(crate) fn spend(&mut self, b: usize) {
        self.spent = Some(b);
    }

    /// Ends the micro-batch: a wait was not in vain if its bucket `has_come` by now.
    pub(crate) fn judge(&mut self, has_come: impl FnOnce(usize) -> bool) {
        self.spent = self.spent.filter(|&b| !has_come(b));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_in_vain_become_shorter_and_come_back() {
        let mut wait_budget = WaitBudget::new(Duration::from_secs(1024));
        let mut waits = |in_vain: bool| {
            wait_budget.begin();
            let left = wait_budget.left();
            if in_vain {
                wait_budget.spend(7);
                assert_eq!(wait_budget.left(), Duration::ZERO);
            }
            left.as_secs()
        };
        assert_eq!([true, true, true].map(&mut waits), [1024, 512, 256]);
        assert_eq!([false, false, false, false, false].map(&mut waits), [128, 256, 512, 1024, 1024]);
        assert_eq!([true; 13].map(&mut waits)[9..], [2, 1, 1, 1]);
    }

    #[test]
    fn what_was_only_slow_is_waited_for_longer() {
        let mut wait_budget = WaitBudget::new(Duration::from_secs(1024));
        let mut waits = |comes: bool| {
            wait_budget.begin();
            let left = wait_budget.left();
            wait_budget.spend(3);
            wait_budget.judge(|b| b == 3 && comes);
            assert_eq!(wait_budget.left().is_zero(), !comes);
            left.as_secs()
        };
        assert_eq!([false; 4].map(&mut waits), [1024, 512, 256, 128]);
        assert_eq!([true; 5].map(&mut waits), [64, 128, 256, 512, 1024]);
    }
}
