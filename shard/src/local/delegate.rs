//! Methods of a worker's own optimizer between exchanges; collective over the worker's ranks.

use super::LocalOptimizer;
#[cfg(feature = "checkpoint")]
use crate::checkpoint::{ModelPlacement, Sink};
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

    /// Brings this worker's parameters to one of its ranks ([`Optimizer::consolidate`](crate::Optimizer::consolidate)).
    #[cfg(feature = "checkpoint")]
    pub fn consolidate(&mut self, to: usize, sink: Sink<'_>) -> Result<(), Error> {
        self.inner.consolidate(to, sink)
    }

    /// [`consolidate`](Self::consolidate) for parameters that are parts of others.
    #[cfg(feature = "checkpoint")]
    pub fn consolidate_placed(
        &mut self,
        to: usize,
        sink: Sink<'_>,
        placing: &dyn ModelPlacement,
    ) -> Result<(), Error> {
        self.inner.consolidate_placed(to, sink, placing)
    }

    /// Releases the memory that the last background save kept
    /// ([`Optimizer::release_snapshot`](crate::Optimizer::release_snapshot)).
    #[cfg(feature = "checkpoint")]
    pub fn release_snapshot(&mut self) {
        self.inner.release_snapshot();
    }
}
