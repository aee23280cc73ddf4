//! Methods of a worker's own optimizer between exchanges; collective over the worker's ranks.

use super::LocalOptimizer;
use crate::{Error, StepArgs, Verified};

impl LocalOptimizer {
    /// Returns the next step's arguments from the options' schedule ([`Optimizer::scheduled`](crate::Optimizer::scheduled)).
    pub fn scheduled(&mut self) -> Result<StepArgs, Error> {
        self.inner.scheduled()
    }

    /// Drops the gradients of a step that is not taken ([`Optimizer::discard_gradients`](crate::Optimizer::discard_gradients)).
    pub fn discard_gradients(&mut self) -> Result<(), Error> {
        self.inner.discard_gradients()
    }

    /// Compares the values that the worker's ranks hold alike ([`Optimizer::verify`](crate::Optimizer::verify)).
    pub fn verify(&mut self) -> Result<Verified, Error> {
        self.inner.verify()
    }

    /// Runs [`verify`](Self::verify) in every `steps`th step ([`Optimizer::verify_every`](crate::Optimizer::verify_every)). Values
    /// written by an exchange count as written by this rank.
    pub fn verify_every(&mut self, steps: u64) -> Result<(), Error> {
        self.inner.verify_every(steps)
    }
}
