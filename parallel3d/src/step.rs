//! Steps on a mesh.

use crate::{Error, LocalOptimizer, Optimizer};
use meshstep_local::{LocalError, LocalStep};
use meshstep_shard::{Guarded, Pending, Step, StepArgs, Verified};

/// Steps are decided by all ranks of the mesh together, and errors name axes and coordinates: a difference is
/// [`Error::Differs`], one without a majority [`Error::NoMajority`].
///
/// Ranks that differ along `tp` only share a micro-batch and pass the same weight. If weights count
/// ([`Combine::Weighted`](meshstep_shard::Combine::Weighted)) and differ, the step fails with [`Error::Weights`]; on a GPU its
/// outcome is [`WeightError::Somewhere`](meshstep_shard::WeightError::Somewhere).
///
/// The parameters are fixed by the model: none can be added later.
impl Step for Optimizer {
    type Outcome = Pending;
    type Error = Error;

    fn optimizer(&self) -> &meshstep_shard::Optimizer {
        &self.inner
    }

    fn guarded(&mut self) -> Guarded<'_> {
        Guarded::new(&mut self.inner)
    }

    fn step(&mut self, at: StepArgs) -> Result<Pending, Error> {
        self.inner.step(at).map_err(|error| self.located(error))
    }

    fn wrap_error(&self, error: meshstep_shard::Error) -> Error {
        self.located(error)
    }

    /// [`Optimizer::verify`] without its list of parts that are equal.
    fn verify(&mut self) -> Result<Verified, Error> {
        Ok(Optimizer::verify(self)?.of)
    }
}

/// The worker's steps and exchanges ([`meshstep_local::LocalOptimizer`]).
impl Step for LocalOptimizer {
    type Outcome = LocalStep;
    type Error = LocalError;

    fn optimizer(&self) -> &meshstep_shard::Optimizer {
        self.inner.optimizer()
    }

    fn guarded(&mut self) -> Guarded<'_> {
        self.inner.guarded()
    }

    fn step(&mut self, at: StepArgs) -> Result<LocalStep, LocalError> {
        self.inner.step(at)
    }
}
