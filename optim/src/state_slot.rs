//! What an update does to a state vector, for code that does not know the rule.

use crate::power;

/// A state vector of a rule: how its elements go on from update to update, and whether they are squares.
///
/// ```
/// use meshstep_optim::{AdamW, Rule};
///
/// let v = AdamW { beta2: 0.5, ..AdamW::default() }.slot(1);
/// assert!(v.squares);
/// // Three updates leave an eighth of what it was.
/// assert_eq!(v.left(4, 7), Some(0.125));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateSlot {
    /// How an element goes on.
    pub carry: Carry,
    /// Whether it averages, sums or compares squares of gradients: the rule takes its root, so it is never negative.
    pub squares: bool,
}

/// How an element of a state vector goes on in an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Carry {
    /// `s = keeps s + a`, where `a` does not depend on `s`.
    Linear {
        /// The factor: an average's beta, 1 of a sum.
        keeps: f64,
        /// The factor of the update with t = 1, where that is another.
        first: Option<f64>,
    },
    /// `s = max(s, a)`.
    Maximum,
}

impl StateSlot {
    /// An average of gradients, or a sum of them that decays: an update keeps `beta` of it.
    pub const fn average(beta: f64) -> Self {
        StateSlot { carry: Carry::Linear { keeps: beta, first: None }, squares: false }
    }

    /// The largest so far.
    pub const fn maximum() -> Self {
        StateSlot { carry: Carry::Maximum, squares: false }
    }

    /// The same of squares.
    pub const fn of_squares(self) -> Self {
        StateSlot { squares: true, ..self }
    }

    /// The same where the update with t = 1 keeps another share.
    pub const fn at_first(self, first: f64) -> Self {
        match self.carry {
            Carry::Linear { keeps, .. } => {
                StateSlot { carry: Carry::Linear { keeps, first: Some(first) }, squares: self.squares }
            }
            Carry::Maximum => self,
        }
    }

    /// The share of what an element was after update `then` that is in it after update `now`, all of it where that is no later;
    /// `None` of a maximum, which has no shares.
    pub fn left(&self, then: u64, now: u64) -> Option<f64> {
        match self.carry {
            Carry::Linear { keeps, first: Some(first) } if then == 0 && now > 0 => {
                Some(first * power(keeps, now - 1))
            }
            Carry::Linear { keeps, .. } => Some(power(keeps, now.saturating_sub(then))),
            Carry::Maximum => None,
        }
    }
}
