//! Range checks: hyperparameters within PyTorch's limits and finite in f32, because a rule's constants may be cast to it, and
//! instructions supported by the machine.

use crate::{Error, Isa};

/// Checks of the hyperparameters of one rule.
pub(crate) struct Check {
    /// Name of the rule, for the error.
    pub(crate) rule: &'static str,
}

impl Check {
    /// Returns an error with the valid range `works` unless `good`.
    pub(crate) fn range(
        &self,
        name: &'static str,
        value: f64,
        good: bool,
        works: &'static str,
    ) -> Result<(), Error> {
        if good { Ok(()) } else { Err(Error::Hyperparameter { rule: self.rule, name, value, works }) }
    }

    /// Checks the decay of an average: in `[0, 1)`.
    pub(crate) fn beta(&self, name: &'static str, value: f64) -> Result<(), Error> {
        self.range(name, value, (0.0..1.0).contains(&value), "a number >= 0 and < 1")
    }

    /// Checks for a value that is finite in f32 and not negative.
    pub(crate) fn at_least_zero(&self, name: &'static str, value: f64) -> Result<(), Error> {
        let good = value >= 0.0 && (value as f32).is_finite();
        self.range(name, value, good, "a number >= 0 that f32 can hold")
    }

    /// Checks for a value that is finite in f32.
    pub(crate) fn finite(&self, name: &'static str, value: f64) -> Result<(), Error> {
        self.range(name, value, (value as f32).is_finite(), "a finite number that f32 can hold")
    }
}

/// Returns an error unless this machine supports `isa`.
pub(crate) fn check_isa(isa: Isa) -> Result<(), Error> {
    if isa.is_available() { Ok(()) } else { Err(Error::Isa { isa }) }
}
