//! Loss scale of a sharded step: one for all ranks, because the exchange shows all of them every overflow.

use crate::config::options::{Options, StepArgs};
use crate::step::decider::Decider;
use meshstep_optim::LossScaleState;

impl Decider {
    /// Returns the loss scale's state for the coming step. On a GPU it waits for the steps launched so far, which decide a
    /// dynamic scale.
    pub(crate) fn loss_scale(&self, options: &Options) -> Option<LossScaleState> {
        let state = self.progress.loss_scale?;
        Some(self.launched.follow(options, state))
    }

    /// Returns the factor on the losses of the coming step's micro-batches; 1 without a loss scale.
    pub(crate) fn loss_factor(&self, options: &Options) -> f64 {
        self.loss_scale(options).map_or(1.0, |state| state.scale)
    }

    /// Returns the caller's gradient factor divided by the loss scale.
    pub(crate) fn unscale(&self, options: &Options, at: &StepArgs) -> f64 {
        at.grad_scale / self.loss_factor(options)
    }

    /// Adjusts the scale after the step that used it.
    pub(crate) fn rescale(&mut self, options: &Options, overflow: bool) {
        if let (Some(rule), Some(state)) = (&options.loss_scale, &mut self.progress.loss_scale) {
            rule.update(state, overflow);
        }
    }

    /// Returns true if a lower scale may avoid overflows.
    pub(crate) fn scale_can_fall(&self, options: &Options) -> bool {
        let both = options.loss_scale.zip(self.progress.loss_scale);
        both.is_some_and(|(rule, state)| rule.can_fall(&state))
    }

    /// Returns the state for ranks to compare: the scale's bits, and its trackers.
    pub(crate) fn loss_scale_words(&self) -> [u64; 3] {
        let words = |s: LossScaleState| [s.scale.to_bits(), s.growth_tracker, s.hysteresis_tracker];
        self.progress.loss_scale.map_or([1f64.to_bits(), 0, 0], words)
    }
}
