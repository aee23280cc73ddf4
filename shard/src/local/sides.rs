//! On which side of an update workers that come and go exchange. A step has one round for them, so one side.

use super::engine::Engine;
use super::{Fragment, LocalError, LocalPlan, OnFailure, Placement};

/// Which sides of a step's update have something to exchange.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sides {
    /// By the plan, before and after.
    planned: [bool; 2],
    /// Because it is to be sent again.
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

    /// The one that is exchanged on: the plan's, before what is to be sent again, which waits.
    pub(crate) fn first(self) -> Option<Placement> {
        let one = |sides: [bool; 2]| BOTH.into_iter().zip(sides).find(|(_, is)| *is).map(|(side, _)| side);
        one(self.planned).or_else(|| one(self.again))
    }
}

/// Refuses plans of which some step may exchange on both sides of its update. Between those there is no boundary: nobody could
/// join at one, as communicators are made between steps.
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

/// Whether `x`, before updates, and `y`, after them, are ever sent or arrive in one step, be it outside the steps that they are for.
fn meet(x: &Fragment, y: &Fragment) -> bool {
    let (Some(p), Some(q)) = (x.timing.period, y.timing.period) else { return false };
    let common = u128::from(gcd(p, q).max(1));
    let counts =
        |f: &Fragment| [0, f.timing.delay].map(|late| u128::from(f.timing.offset) + u128::from(late));
    // At step `t` the one is known by the count `t`, the other by `t + 1`.
    let apart = |i: u128, j: u128| (i + 1) % common != j % common;
    counts(x).into_iter().any(|i| counts(y).into_iter().any(|j| !apart(i, j)))
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::super::{Timing, What};
    use super::*;
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
            // As long as any two periods, and a delay before it.
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
