//! Steps at which a fragment is due: a pure function of the steps that the group has taken.

use std::ops::Range;

/// Side of a step's update on which an exchange lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Placement {
    /// At the end of a step: the rule updates as usual, then the values due are merged. Workers are bit-equal in these values
    /// afterwards.
    #[default]
    After,
    /// At the beginning of a step, as papers write it: the values due are merged, then updated with the gradient computed before.
    Before,
}

/// Schedule of a fragment.
///
/// An exchange lies between two updates, and is identified by the number `c` of steps taken before it: for step `t`, from 0, `c` is
/// `t` before the update and `t + 1` after it. A fragment is due if `c mod period = offset`, within `during`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Timing {
    /// Steps from one exchange to the next; `None`: never.
    pub period: Option<u64>,
    /// Steps into the period, below `period`.
    pub offset: u64,
    /// Steps from the snapshot to the arrival of its result, during which training continues; below `period`.
    pub delay: u64,
    /// Before or after the update.
    pub placement: Placement,
    /// Counts of steps at which the fragment may be due.
    pub during: Range<u64>,
}

impl Timing {
    /// The range of all steps.
    pub const ALWAYS: Range<u64> = 0..u64::MAX;

    /// After every `period`th update, without delay.
    pub fn every(period: u64) -> Self {
        Timing { period: Some(period), ..Timing::never() }
    }

    /// Never due.
    pub fn never() -> Self {
        Timing { period: None, offset: 0, delay: 0, placement: Placement::After, during: Timing::ALWAYS }
    }

    /// Returns true if the fragment is due at step `step`, from 0.
    pub fn due(&self, step: u64) -> bool {
        let count = self.placement.count(step);
        // The plan's check refuses a period of 0; here it is never due.
        let hits = self.period.and_then(|period| count.checked_rem(period)) == Some(self.offset);
        hits && self.during.contains(&count)
    }

    /// Returns true if a result sent `delay` steps before arrives at step `step`.
    pub fn arrives(&self, step: u64) -> bool {
        step.checked_sub(self.delay).is_some_and(|sent| self.due(sent))
    }

    /// Returns how often the fragment is due in steps `0..horizon`.
    pub fn times(&self, horizon: u64) -> u64 {
        let Some(period) = self.period.filter(|&period| period > 0) else { return 0 };
        let reached = match self.placement {
            Placement::Before => 0..horizon,
            Placement::After => 1..horizon.saturating_add(1),
        };
        let below = |end: u64| end.saturating_sub(self.offset).div_ceil(period);
        let (start, end) = (reached.start.max(self.during.start), reached.end.min(self.during.end));
        below(end).saturating_sub(below(start))
    }
}

impl Placement {
    /// Returns the number of steps taken before an exchange of step `step`.
    pub fn count(self, step: u64) -> u64 {
        match self {
            Placement::Before => step,
            Placement::After => step.saturating_add(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn steps(timing: &Timing, horizon: u64) -> Vec<u64> {
        (0..horizon).filter(|&t| timing.due(t)).collect()
    }

    #[test]
    fn before_and_after_meet_at_the_same_points() {
        let after = Timing::every(4);
        let before = Timing { placement: Placement::Before, ..after.clone() };
        assert_eq!(steps(&after, 13), [3, 7, 11]);
        assert_eq!(steps(&before, 13), [0, 4, 8, 12]);
        assert!(steps(&Timing::never(), 100).is_empty());
        let late = Timing { offset: 1, during: 5..10, ..after };
        assert_eq!(steps(&late, 20), [4, 8]);
        assert!(steps(&Timing::every(0), 9).is_empty());
    }

    #[test]
    fn what_is_sent_arrives_after_the_delay() {
        let timing = Timing { delay: 3, ..Timing::every(5) };
        let arrives: Vec<u64> = (0..20).filter(|&t| timing.arrives(t)).collect();
        // Nothing was sent before the first step.
        assert_eq!(arrives, [7, 12, 17]);
        let before = Timing { placement: Placement::Before, ..timing };
        assert_eq!((0..20).filter(|&t| before.arrives(t)).collect::<Vec<_>>(), [3, 8, 13, 18]);
    }

    proptest! {
        #[test]
        fn times_counts_what_is_due(
            period in 1u64..20, offset in 0u64..20, before: bool, from in 0u64..50, len in 0u64..90, horizon in 0u64..120
        ) {
            let placement = if before { Placement::Before } else { Placement::After };
            let timing = Timing { offset: offset % period, placement, during: from..from + len, ..Timing::every(period) };
            prop_assert_eq!(timing.times(horizon), steps(&timing, horizon).len() as u64);
        }
    }
}
