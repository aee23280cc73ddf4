//! Sides of the update on which elastic workers exchange. A step has a single round, and therefore a single side.

use crate::exchange::engine::Engine;
use crate::{Fragment, LocalError, LocalPlan, OnFailure, Placement};

/// Sides of a step's update on which fragments are exchanged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sides {
    /// Exchanges by the plan, before and after the update.
    planned: [bool; 2],
    /// Fragments to be sent again, before and after the update.
    again: [bool; 2],
}

const BOTH: [Placement; 2] = [Placement::Before, Placement::After];

impl Sides {
    pub(crate) fn of(engine: &Engine) -> Self {
        let Engine { plan, flights, again, step, .. } = engine;
        let away = |f: usize| flights.iter().any(|flight| flight.fragments.contains(&f));
        let sent = |f: usize| plan.fragments[f].travels() && !away(f);
        let planned = |placement| {
            plan.due(*step, placement).any(sent)
                || flights.iter().any(|flight| flight.arrives == (*step, placement))
        };
        let retried =
            |placement| again.iter().any(|&f| sent(f) && plan.fragments[f].timing.placement == placement);
        Sides { planned: BOTH.map(planned), again: BOTH.map(retried) }
    }

    /// Returns the side on which the step exchanges: the plan's side takes precedence, and fragments to be sent again wait.
    pub(crate) fn first(self) -> Option<Placement> {
        let one = |sides: [bool; 2]| BOTH.into_iter().zip(sides).find(|(_, is)| *is).map(|(side, _)| side);
        one(self.planned).or_else(|| one(self.again))
    }
}

/// Refuses plans with steps that may exchange on both sides of their update. A round covers one side only: communicators are made
/// between steps, so workers could not join between the two sides.
pub(crate) fn check_sides(plan: &LocalPlan) -> Result<(), LocalError> {
    let of = |side| {
        let all = plan.fragments.iter().enumerate();
        all.filter(move |(_, f)| f.travels() && f.timing.placement == side)
    };
    for (before, x) in of(Placement::Before) {
        for (after, y) in of(Placement::After) {
            let late = |f: &Fragment| f.on_failure == OnFailure::Retry && f.timing.delay > 0;
            if late(x) || late(y) || meet(x, y) {
                return Err(LocalError::BothSides { before, after });
            }
        }
    }
    Ok(())
}

/// Returns true if `x`, before updates, and `y`, after them, are ever sent or arrive in one step, even outside the steps they are
/// for.
fn meet(x: &Fragment, y: &Fragment) -> bool {
    let (Some(p), Some(q)) = (x.timing.period, y.timing.period) else { return false };
    let common = u128::from(gcd(p, q).max(1));
    let counts =
        |f: &Fragment| [0, f.timing.delay].map(|late| u128::from(f.timing.offset) + u128::from(late));
    // At step `t`, `x` is identified by the count `t`, and `y` by `t + 1`.
    let apart = |i: u128, j: u128| (i + 1) % common != j % common;
    counts(x).into_iter().any(|i| counts(y).into_iter().any(|j| !apart(i, j)))
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Timing, What};
    use proptest::prelude::*;

    fn fragment(placement: Placement, period: u64, offset: u64, delay: u64) -> Fragment {
        Fragment::mean(What::Params, Timing { offset, delay, placement, ..Timing::every(period) })
    }

    proptest! {
        #[test]
        fn who_meets_is_found_by_looking_at_every_step(
            (p, q) in (1u64..9, 1u64..9), (i, j) in (0u64..9, 0u64..9), (d, e) in (0u64..9, 0u64..9)
        ) {
            let x = fragment(Placement::Before, p, i % p, d % p);
            let y = fragment(Placement::After, q, j % q, e % q);
            let at = |f: &Fragment, t: u64| f.timing.due(t) || f.timing.arrives(t);
            // Covers any two periods, after any delay.
            let seen = (9..9 + 9 * 8).any(|t| at(&x, t) && at(&y, t));
            prop_assert_eq!(meet(&x, &y), seen);
        }
    }

    #[test]
    fn plans_are_refused_by_name() {
        let x = fragment(Placement::Before, 4, 0, 0);
        let mut y = fragment(Placement::After, 6, 0, 2);
        assert!(check_sides(&LocalPlan::new(vec![y.clone(), x.clone()])).is_ok());
        y.on_failure = OnFailure::Retry;
        let told = check_sides(&LocalPlan::new(vec![y.clone(), x.clone()]));
        assert!(matches!(told, Err(LocalError::BothSides { before: 1, after: 0 })));
        y.timing.placement = Placement::Before;
        assert!(check_sides(&LocalPlan::new(vec![y, x])).is_ok());
    }
}
