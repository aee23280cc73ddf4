//! The loss scale of a sharded step: one for all ranks, since all learn of every overflow from the same exchange.

use crate::config::options::At;
use crate::{Error, MicroBatch, Optimizer};
use meshstep_optim::LossScaleState;

impl Optimizer {
    /// What the losses of the coming step, all its micro-batches', are to be multiplied with; 1 without
    /// [`Options::loss_scale`](crate::Options::loss_scale). It changes in [`step`](Self::step) alone, after the gradients were
    /// divided by it, and not where the step is an error. On a GPU a dynamic scale is known once the steps so far are decided:
    /// this waits for them, and a kernel that reads `loss_scale_address` (feature `cuda`) does not.
    pub fn loss_scale(&self) -> f64 {
        self.loss_scale_state().map_or(1.0, |state| state.scale)
    }

    /// The loss scale's state, to be saved; the same on every rank. On a GPU it waits as [`loss_scale`](Self::loss_scale) does.
    pub fn loss_scale_state(&self) -> Option<LossScaleState> {
        #[cfg_attr(not(feature = "cuda"), allow(unused_mut, reason = "steps are known at once"))]
        let mut state = self.progress.loss_scale?;
        #[cfg(feature = "cuda")]
        self.follow_unheard(&mut state);
        Some(state)
    }

    /// Goes on from a saved state, between two steps. Every rank restores the same: the next step compares.
    pub fn restore_loss_scale(&mut self, state: LossScaleState) -> Result<(), Error> {
        self.check_idle()?;
        let rule = self.options.loss_scale.ok_or(Error::NoLossScale)?;
        rule.check_state(&state)?;
        #[cfg(feature = "cuda")]
        self.take_notes(true)?;
        self.progress.loss_scale = Some(state);
        #[cfg(feature = "cuda")]
        self.tell_there()?;
        Ok(())
    }

    /// The caller's factor on gradients over the scale their losses had. Waits as [`loss_scale`](Self::loss_scale) does.
    pub(crate) fn unscale(&self, at: &At) -> f64 {
        at.grad_scale / self.loss_scale()
    }

    /// Lets the scale follow the step that has used it.
    pub(crate) fn rescale(&mut self, overflow: bool) {
        if let (Some(rule), Some(state)) = (&self.options.loss_scale, &mut self.progress.loss_scale) {
            rule.update(state, overflow);
        }
    }

    /// Whether overflows may be the scale's fault, and pass once it is lower.
    pub(crate) fn scale_can_fall(&self) -> bool {
        let both = self.options.loss_scale.zip(self.progress.loss_scale);
        both.is_some_and(|(rule, state)| rule.can_fall(&state))
    }

    /// The state for ranks to compare: the scale's bits, and its trackers.
    pub(crate) fn loss_scale_words(&self) -> [u64; 3] {
        let words = |s: LossScaleState| [s.scale.to_bits(), s.growth_tracker, s.hysteresis_tracker];
        self.progress.loss_scale.map_or([1f64.to_bits(), 0, 0], words)
    }
}

impl MicroBatch<'_> {
    /// What this micro-batch's loss is to be multiplied with: [`Optimizer::loss_scale`].
    pub fn loss_scale(&self) -> f64 {
        self.optimizer.loss_scale()
    }
}
