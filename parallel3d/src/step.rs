//! Step methods of an optimizer on a mesh, same as those on a single group. The parameters are fixed by the model: none can be added
//! later.

use crate::Optimizer;
use meshstep_optim::LossScaleState;
use meshstep_shard::{Error, Evaluated, MicroBatch, Minimized, Pending, StepArgs, Until};

type Failed = Box<dyn std::error::Error + Send + Sync>;

impl Optimizer {
    /// [`meshstep_shard::Optimizer::micro_batch`], with weight in samples or tokens. Ranks that differ along `tp` only share a
    /// micro-batch and pass the same weight. If weights count ([`Combine::Weighted`](meshstep_shard::Combine::Weighted)) and differ, the
    /// step fails with [`crate::Error::Weights`]; on a GPU its outcome is
    /// [`WeightError::Somewhere`](meshstep_shard::WeightError::Somewhere).
    pub fn micro_batch(&mut self, weight: u64) -> Result<MicroBatch<'_>, Error> {
        self.inner.micro_batch(weight)
    }

    /// [`meshstep_shard::Optimizer::accumulate`].
    pub fn accumulate(&mut self, weight: u64) -> Result<MicroBatch<'_>, Error> {
        self.inner.accumulate(weight)
    }

    /// [`meshstep_shard::Optimizer::scheduled`].
    pub fn scheduled(&mut self) -> Result<StepArgs, Error> {
        self.inner.scheduled()
    }

    /// [`meshstep_shard::Optimizer::step`], decided by all ranks of the mesh together. A difference found by its verification is reported
    /// as in [`verify`](Self::verify).
    pub fn step(&mut self, at: StepArgs) -> Result<Pending, crate::Error> {
        self.inner.step(at).map_err(|error| self.located(error))
    }

    /// [`meshstep_shard::Optimizer::step_with`], which reports a difference as [`verify`](Self::verify) does.
    pub fn step_with<E: Into<Failed>>(
        &mut self,
        at: StepArgs,
        weight: u64,
        closure: impl FnOnce(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<Evaluated, crate::Error> {
        self.inner.step_with(at, weight, closure).map_err(|error| self.located(error))
    }

    /// [`meshstep_shard::Optimizer::minimize`], which reports a difference as [`verify`](Self::verify) does.
    pub fn minimize<E: Into<Failed>>(
        &mut self,
        until: Until,
        at: impl FnMut(u64) -> StepArgs,
        weight: u64,
        closure: impl FnMut(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<Minimized, crate::Error> {
        self.inner.minimize(until, at, weight, closure).map_err(|error| self.located(error))
    }

    /// [`meshstep_shard::Optimizer::discard_gradients`].
    pub fn discard_gradients(&mut self) -> Result<(), Error> {
        self.inner.discard_gradients()
    }

    /// [`meshstep_shard::Optimizer::restore_loss_scale`].
    pub fn restore_loss_scale(&mut self, state: LossScaleState) -> Result<(), Error> {
        self.inner.restore_loss_scale(state)
    }

    /// [`meshstep_shard::Optimizer::restore_steps`].
    pub fn restore_steps(&mut self, steps: u64) -> Result<(), Error> {
        self.inner.restore_steps(steps)
    }

    /// [`meshstep_shard::Optimizer::loss_scale_address`].
    #[cfg(feature = "cuda")]
    pub fn loss_scale_address(&mut self) -> Result<Option<u64>, Error> {
        self.inner.loss_scale_address()
    }
}
