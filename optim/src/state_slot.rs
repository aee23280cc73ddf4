//! Effect of an update on a state vector, for code that does not know the rule.

use crate::power;

/// Description of a state vector: the recurrence of its elements, and whether they are squares.
///
/// ```
/// use meshstep_optim::{AdamW, Rule};
///
/// let v = AdamW { beta2: 0.5, ..AdamW::default() }.slot(1);
/// assert!(v.squares);
/// // Three updates leave an eighth of the element.
/// assert_eq!(v.left(4, 7), Some(0.125));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateSlot {
    /// Recurrence of an element.
    pub carry: Carry,
    /// True if the vector averages, sums or compares squares of gradients: the rule takes its root, so it is never negative.
    pub squares: bool,
}

/// Recurrence of an element of a state vector over updates.
///
/// ```
/// use meshstep_optim::{AdamW, Carry, Rule};
///
/// let rule = AdamW { amsgrad: true, ..AdamW::default() };
/// assert_eq!(rule.slot(0).carry, Carry::Linear { keeps: 0.9, first: None });
/// assert_eq!(rule.slot(2).carry, Carry::Maximum);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Carry {
    /// `s = keeps s + a`, where `a` does not depend on `s`.
    Linear {
        /// Factor: beta of an average, 1 of a sum.
        keeps: f64,
        /// Factor of the update with t = 1, if it differs.
        first: Option<f64>,
    },
    /// `s = max(s, a)`.
    Maximum,
}

impl StateSlot {
    /// Describes an average of gradients, or a decaying sum: an update keeps the fraction `beta`.
    pub const fn average(beta: f64) -> Self {
        StateSlot { carry: Carry::Linear { keeps: beta, first: None }, squares: false }
    }

    /// Describes a running maximum.
    pub const fn maximum() -> Self {
        StateSlot { carry: Carry::Maximum, squares: false }
    }

    /// Marks the vector as holding squares.
    pub const fn of_squares(self) -> Self {
        StateSlot { squares: true, ..self }
    }

    /// Sets a different factor for the update with t = 1.
    pub const fn at_first(self, first: f64) -> Self {
        match self.carry {
            Carry::Linear { keeps, .. } => {
                StateSlot { carry: Carry::Linear { keeps, first: Some(first) }, squares: self.squares }
            }
            Carry::Maximum => self,
        }
    }

    /// Returns the fraction of an element's value after update `then` that remains after update `now`: 1 if `now` is not later, and
    /// `None` for a maximum.
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
