//! How long a rank waits for a bucket that travels.
//!
//! A rank that lacks a gradient sends that bucket only where its micro-batch ends. If it waits before that for another rank in a
//! collective of the model, or in a gather, and that rank waits for the bucket, neither goes on. Neither can know: what others have
//! sent is told by nothing but the bucket's arrival. So a wait has an end, after which memory is taken beyond the plan; and what
//! happens in one micro-batch is likely to happen in the next, so that waits become shorter. A bucket that has come before this rank's
//! own micro-batch ends was slow, and waited for nothing of this rank: then they become longer again.

use std::time::Duration;

/// Waits are at their shortest after so many micro-batches.
const HALVINGS: u32 = 10;

/// What is left of it.
#[derive(Debug)]
pub(crate) struct Patience {
    whole: Duration,
    /// How often it has been halved.
    halvings: u32,
    /// The bucket that this micro-batch has waited for in vain.
    spent: Option<usize>,
}

impl Patience {
    /// Nothing was in vain yet.
    pub(crate) fn new(whole: Duration) -> Self {
        Patience { whole, halvings: 0, spent: None }
    }

    /// Begins a micro-batch: half as long after one that has waited in vain, else twice, as it was in the beginning at most.
    pub(crate) fn begin(&mut self) {
        self.halvings = if self.spent.is_some() {
            HALVINGS.min(self.halvings + 1)
        } else {
            self.halvings.saturating_sub(1)
        };
        self.spent = None;
    }

    /// How long to wait: not at all in a micro-batch that has waited in vain.
    pub(crate) fn left(&self) -> Duration {
        if self.spent.is_some() { Duration::ZERO } else { self.whole / (1 << self.halvings) }
    }

    /// A wait for bucket `b` was in vain.
    pub(crate) fn spend(&mut self, b: usize) {
        self.spent = Some(b);
    }

    /// The micro-batch ends here: whether a wait was in vain after all, of which `has_come` tells.
    pub(crate) fn judge(&mut self, has_come: impl FnOnce(usize) -> bool) {
        self.spent = self.spent.filter(|&b| !has_come(b));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_in_vain_become_shorter_and_come_back() {
        let mut patience = Patience::new(Duration::from_secs(1024));
        let mut waits = |in_vain: bool| {
            patience.begin();
            let left = patience.left();
            if in_vain {
                patience.spend(7);
                assert_eq!(patience.left(), Duration::ZERO);
            }
            left.as_secs()
        };
        assert_eq!([true, true, true].map(&mut waits), [1024, 512, 256]);
        assert_eq!([false, false, false, false, false].map(&mut waits), [128, 256, 512, 1024, 1024]);
        assert_eq!([true; 13].map(&mut waits)[9..], [2, 1, 1, 1]);
    }

    #[test]
    fn what_was_only_slow_is_waited_for_longer() {
        let mut patience = Patience::new(Duration::from_secs(1024));
        let mut waits = |comes: bool| {
            patience.begin();
            let left = patience.left();
            patience.spend(3);
            patience.judge(|b| b == 3 && comes);
            assert_eq!(patience.left().is_zero(), !comes);
            left.as_secs()
        };
        assert_eq!([false; 4].map(&mut waits), [1024, 512, 256, 128]);
        assert_eq!([true; 5].map(&mut waits), [64, 128, 256, 512, 1024]);
    }
}
