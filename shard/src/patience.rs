//! How long a rank waits for a bucket that travels.
//!
//! A rank that lacks a gradient sends that bucket only where its micro-batch ends. If it waits before that for another rank in a
//! collective of the model, or in a gather, and that rank waits for the bucket, neither goes on. Neither can know: what others have
//! sent is told by nothing but the bucket's arrival. So a wait has an end, after which memory is taken beyond the plan; and what
//! happens in one micro-batch is likely to happen in the next, so that waits become shorter.

use std::time::Duration;

/// Waits are at their shortest after so many micro-batches.
const HALVINGS: u32 = 10;

/// What is left of it.
#[derive(Debug)]
pub(crate) struct Patience {
    whole: Duration,
    /// How often it has been halved.
    halvings: u32,
    /// Whether this micro-batch has waited in vain.
    spent: bool,
}

impl Patience {
    /// Nothing was in vain yet.
    pub(crate) fn new(whole: Duration) -> Self {
        Patience { whole, halvings: 0, spent: false }
    }

    /// Begins a micro-batch: half as long after one that has waited in vain, else twice, as it was in the beginning at most.
    pub(crate) fn begin(&mut self) {
        self.halvings =
            if self.spent { HALVINGS.min(self.halvings + 1) } else { self.halvings.saturating_sub(1) };
        self.spent = false;
    }

    /// How long to wait: not at all in a micro-batch that has waited in vain.
    pub(crate) fn left(&self) -> Duration {
        if self.spent { Duration::ZERO } else { self.whole / (1 << self.halvings) }
    }

    /// A wait was in vain.
    pub(crate) fn spend(&mut self) {
        self.spent = true;
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
                patience.spend();
                assert_eq!(patience.left(), Duration::ZERO);
            }
            left.as_secs()
        };
        assert_eq!([true, true, true].map(&mut waits), [1024, 512, 256]);
        assert_eq!([false, false, false, false, false].map(&mut waits), [128, 256, 512, 1024, 1024]);
        assert_eq!([true; 13].map(&mut waits)[9..], [2, 1, 1, 1]);
    }
}
