//! Loss scale of a sharded step: one for all ranks, because the exchange shows all of them every overflow.

use crate::config::options::StepArgs;
use crate::{Error, MicroBatch, Optimizer};
use meshstep_optim::LossScaleState;

impl Optimizer {
    /// Returns the factor by which the caller multiplies the losses of all micro-batches of the coming step; 1 without
    /// [`Options::loss_scale`](crate::Options::loss_scale). It changes in [`step`](Self::step) only, after the gradients were
    /// divided by it, and not if the step is an error. On a GPU this waits for the steps launched so far, which decide a dynamic
    /// scale; a kernel that reads `loss_scale_address` (feature `cuda`) does not wait.
    pub fn loss_scale(&self) -> f64 {
        self.loss_scale_state().map_or(1.0, |state| state.scale)
    }

    /// Returns the loss scale's state, for a checkpoint; the same on every rank. On a GPU it waits as
    /// [`loss_scale`](Self::loss_scale) does.
    pub fn loss_scale_state(&self) -> Option<LossScaleState> {
        #[cfg_attr(not(feature = "cuda"), allow(unused_mut, reason = "steps are known at once"))]
        let mut state = self.progress.loss_scale?;
        #[cfg(feature = "cuda")]
        self.follow_unheard(&mut state);
        Some(state)
    }

    /// Restores a saved state, between two steps. All ranks restore the same state, which the next step compares.
    pub fn restore_loss_scale(&mut self, state: LossScaleState) -> Result<(), Error> {
        self.check_idle()?;
        let rule = self.options.loss_scale.ok_or(Error::NoLossScale)?;
        rule.check_state(&state)?;
        #[cfg(feature = "cuda")]
        self.take_notes(true)?;
        self.progress.loss_scale = Some(state);
        #[cfg(feature = "cuda")]
        self.publish_to_gpu()?;
        Ok(())
    }

    /// Returns the caller's gradient factor divided by the loss scale. Waits as [`loss_scale`](Self::loss_scale) does.
    pub(crate) fn unscale(&self, at: &StepArgs) -> f64 {
        at.grad_scale / self.loss_scale()
    }

    /// Adjusts the scale after the step that used it.
    pub(crate) fn rescale(&mut self, overflow: bool) {
        if let (Some(rule), Some(state)) = (&self.options.loss_scale, &mut self.progress.loss_scale) {
            rule.update(state, overflow);
        }
    }

    /// Returns true if a lower scale may avoid overflows.
    pub(crate) fn scale_can_fall(&self) -> bool {
        let both = self.options.loss_scale.zip(self.progress.loss_scale);
        both.is_some_and(|(rule, state)| rule.can_fall(&state))
    }

    /// Returns the state for ranks to compare: the scale's bits, and its trackers.
    pub(crate) fn loss_scale_words(&self) -> [u64; 3] {
        let words = |s: LossScaleState| [s.scale.to_bits(), s.growth_tracker, s.hysteresis_tracker];
        self.progress.loss_scale.map_or([1f64.to_bits(), 0, 0], words)
    }
}

impl MicroBatch<'_> {
    /// Returns the factor on this micro-batch's loss: [`Optimizer::loss_scale`].
    pub fn loss_scale(&self) -> f64 {
        self.optimizer.loss_scale()
    }
}
