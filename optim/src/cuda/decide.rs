//! Arguments and results of the kernels that decide a step (`norm/decide.cu`): arithmetic on an exchange's two vectors.
//!
//! ```text
//! decide_bring (const Settings*, const Progress*, u64* sum, u64* max, u64 counted)                          before the exchange
//! decide       (const Settings*, Progress*, const u64* sum, const u64* max, Step*, Decided*, u64 counted)   after it
//! decide_norm  (const Settings*, const Progress*, const u64* sum, const u64* max, Decided*)               after another
//! ```
//!
//! Each kernel runs as one block. Ranks add `sum`: number of non-finite elements, weight, the words of the norm, then for each parameter
//! the number of ranks with a gradient (two parameters a word), and last [`Settings::balance`]. Ranks take the maximum of `max`: bits of
//! the largest gradient, fault, digest and its complement, then for each of [`Settings::params`] the fault of a rank without its
//! gradient, and last the [`FIELDS`] and their complements. A norm's kernel adds to both vectors first, and its words are carried.
//!
//! For each of `counted` parameters, ranks count the gradients. One byte per parameter follows the settings (nonzero if this rank has a
//! gradient; padded with 0 to whole words), the step, and the decision (nonzero if any rank has one, so that the parameter is updated).

use crate::{LossScale, LossScaleState, Norm};

/// Settings of a step, with the data about the run and this rank that the decision needs.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Settings {
    /// Learning rate, for [`StepScalars::lr`](super::StepScalars::lr).
    pub lr: f64,
    /// Largest norm that gradients may have; infinite: no limit.
    pub max_norm: f64,
    /// Caller's factor on every gradient.
    pub grad_scale: f64,
    /// Number of micro-batches in the step.
    pub batches: u64,
    /// Number of collectives so far, compared between ranks.
    pub launches: u64,
    /// Digest of the rules' hyperparameters, compared between ranks.
    pub rules: u64,
    /// Index of this rank.
    pub rank: u64,
    /// Weight of this rank's micro-batches.
    pub weight: u64,
    /// Word with a wrapping sum of 0 over all ranks if all ranks that compute the same micro-batches gave them the same weight.
    pub balance: u64,
    /// Fault of this rank as a word: 0 for none, larger is more severe. A word below `1 << 56` is a notice: it reaches
    /// [`Decided::fault`] and fails no step.
    pub fault: u64,
    /// Number of ranks.
    pub world_size: u64,
    /// Number of parameters that need a gradient on all ranks or on none: all counted ones, or 0 to disable the check.
    pub params: u64,
    /// [`DynamicLossScale::growth_factor`](crate::DynamicLossScale::growth_factor).
    pub growth_factor: f64,
    /// [`DynamicLossScale::backoff_factor`](crate::DynamicLossScale::backoff_factor).
    pub backoff_factor: f64,
    /// [`DynamicLossScale::min_scale`](crate::DynamicLossScale::min_scale).
    pub min_scale: f64,
    /// [`DynamicLossScale::growth_interval`](crate::DynamicLossScale::growth_interval).
    pub growth_interval: u64,
    /// [`DynamicLossScale::hysteresis`](crate::DynamicLossScale::hysteresis).
    pub hysteresis: u64,
    /// Nonzero: the loss scale is dynamic.
    pub dynamic: u32,
    /// Combination of gradients: 0 mean over micro-batches, 1 sum, 2 sum divided by the sum of weights.
    pub combine: u32,
    /// [`norm_code`] of the norm used for clipping and reporting.
    pub norm: u32,
    /// Nonzero: `max_norm` limits the combined gradient.
    pub clips: u32,
    /// Maximum number of consecutive skipped steps at a loss scale that cannot fall further.
    pub max_skips: u32,
    /// Value for [`StepScalars::zero_grads`](super::StepScalars::zero_grads).
    pub zero_grads: u32,
    /// Nonzero: the step is applied even if gradients are not finite; the norm is then infinite.
    pub propagates: u64,
}

impl Default for Settings {
    /// One rank with one micro-batch at learning rate 0, any norm, no limit on skipped steps, constant loss scale.
    fn default() -> Self {
        Settings {
            lr: 0.0,
            max_norm: f64::INFINITY,
            grad_scale: 1.0,
            batches: 1,
            launches: 0,
            rules: 0,
            rank: 0,
            weight: 1,
            balance: 0,
            fault: 0,
            world_size: 1,
            params: 0,
            growth_factor: 1.0,
            backoff_factor: 1.0,
            min_scale: 1.0,
            growth_interval: 1,
            hysteresis: 1,
            dynamic: 0,
            combine: 0,
            norm: 1,
            clips: 1,
            max_skips: u32::MAX,
            zero_grads: 0,
            propagates: 0,
        }
    }
}

impl Settings {
    /// Returns the settings with this loss scale rule.
    #[must_use]
    pub fn with_loss_scale(self, rule: Option<&LossScale>) -> Self {
        let Some(LossScale::Dynamic(rule)) = rule else { return Settings { dynamic: 0, ..self } };
        Settings {
            dynamic: 1,
            growth_factor: rule.growth_factor,
            backoff_factor: rule.backoff_factor,
            min_scale: rule.min_scale,
            growth_interval: rule.growth_interval,
            hysteresis: rule.hysteresis,
            ..self
        }
    }
}

/// State that continues from step to step, on the device.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Progress {
    /// Number of steps taken or skipped.
    pub steps: u64,
    /// Loss scale of the next step; 1 without loss scaling.
    pub scale: f64,
    /// [`LossScaleState::growth_tracker`].
    pub growth_tracker: u64,
    /// [`LossScaleState::hysteresis_tracker`].
    pub hysteresis_tracker: u64,
    /// Number of consecutive skipped steps.
    pub skips: u32,
    /// Number of these with a loss scale that could not fall further.
    pub skips_at_min_scale: u32,
}

impl Progress {
    /// Creates the state before the first step or after `steps` steps, with the state of the loss scale.
    pub fn new(steps: u64, loss_scale: Option<LossScaleState>) -> Self {
        let (scale, growth_tracker, hysteresis_tracker) =
            loss_scale.map_or((1.0, 0, 0), |s| (s.scale, s.growth_tracker, s.hysteresis_tracker));
        Progress { steps, scale, growth_tracker, hysteresis_tracker, skips: 0, skips_at_min_scale: 0 }
    }

    /// Returns the state of the loss scale.
    pub fn loss_scale(&self) -> LossScaleState {
        let Progress { scale, growth_tracker, hysteresis_tracker, .. } = *self;
        LossScaleState { scale, growth_tracker, hysteresis_tracker }
    }
}

/// Number of words that must be equal on every rank, in this order: [`Progress::steps`], the bits of [`Settings::lr`], `max_norm`,
/// `grad_scale` and [`Progress::scale`], the loss scale's two trackers, [`Settings::batches`], `launches`, `rules`.
pub const FIELDS: usize = 10;

/// Decision of a step, the same on every rank except for [`mine`](Self::mine).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Decided {
    /// Norm of the whole combined gradient before clipping, if the step was applied.
    pub norm: f64,
    /// Clipping factor of the combined gradient.
    pub coef: f64,
    /// Number of non-finite gradient elements.
    pub non_finite: u64,
    /// Sum of all ranks' weights.
    pub weight: u64,
    /// Most severe fault of all ranks; for [`Verdict::Uneven`], the fault of the lowest rank without the gradient.
    pub fault: u64,
    /// First parameter with a gradient on some ranks only; for [`Verdict::Parted`], the first of [`FIELDS`] that differs.
    pub param: u64,
    /// This rank's value of the field that differs; the only value here that differs between ranks.
    pub mine: u64,
    /// Smallest value of that field over all ranks.
    pub smallest: u64,
    /// Largest value of that field over all ranks.
    pub largest: u64,
    /// Index in [`Verdict::ALL`].
    pub verdict: u32,
    /// Number of consecutive skipped steps, including this one if it was skipped.
    pub in_a_row: u32,
}

/// Outcome of a step. From `Faulty` on, the outcome is an error, the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Parameters and state have advanced one step.
    Applied,
    /// Some gradient element was not finite.
    Skipped,
    /// A rank reported a fault: [`Decided::fault`].
    Faulty,
    /// Ranks passed different values: [`Decided::param`].
    Parted,
    /// Some ranks have a gradient for [`Decided::param`] and some have none.
    Uneven,
    /// Gradients are weighted, and all weights are 0.
    Weightless,
    /// Too many consecutive steps were skipped.
    TooManySkips,
    /// The norm for clipping is not a number.
    NoNorm,
    /// The sum of [`Settings::balance`] is not 0.
    Unbalanced,
}

impl Verdict {
    /// All outcomes in the order of their numbers.
    pub const ALL: [Verdict; 9] = [
        Verdict::Applied,
        Verdict::Skipped,
        Verdict::Faulty,
        Verdict::Parted,
        Verdict::Uneven,
        Verdict::Weightless,
        Verdict::TooManySkips,
        Verdict::NoNorm,
        Verdict::Unbalanced,
    ];
}

/// Returns the kernels' code of a norm; [`Norm::P`] has none.
pub fn norm_code(norm: Norm) -> Option<u32> {
    match norm {
        Norm::L1 => Some(0),
        Norm::L2 => Some(1),
        Norm::Inf => Some(2),
        Norm::P(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn layouts_are_those_of_the_kernels() {
        assert_eq!((size_of::<Settings>(), size_of::<Progress>(), size_of::<Decided>()), (168, 40, 80));
        assert_eq!((offset_of!(Settings, dynamic), offset_of!(Settings, growth_factor)), (136, 96));
        assert_eq!((offset_of!(Progress, skips), offset_of!(Decided, verdict)), (32, 72));
        assert!(Verdict::ALL.iter().enumerate().all(|(i, &verdict)| verdict as usize == i));
    }

    #[test]
    fn a_loss_scale_goes_there_and_back() {
        let state = LossScale::Dynamic(Default::default()).start();
        assert_eq!(Progress::new(3, Some(state)).loss_scale(), state);
        assert_eq!(Progress::new(3, None).scale, 1.0);
    }
}
