//! What the kernels of a step's decision are told and tell (`norm/decide.cu`): arithmetic on an exchange's two vectors.
//!
//! ```text
//! decide_bring (const Settings*, const Progress*, u64* sum, u64* max, u64 counted)                          before the exchange
//! decide       (const Settings*, Progress*, const u64* sum, const u64* max, Step*, Decided*, u64 counted)   after it
//! decide_norm  (const Settings*, const Progress*, const u64* sum, const u64* max, Decided*)               after another
//! ```
//!
//! Each is one block. `sum` is what ranks add: elements that are not finite, weight, the words of the norm, then two
//! parameters a word, how many ranks have a gradient for each, and at last [`Settings::balance`]. `max` is what they take the largest of: bits of the largest
//! gradient, fault, digest and its complement, then for each of [`Settings::params`] the fault of a rank without its
//! gradient, and at last the
//! [`FIELDS`] and their complements. A norm's kernel adds to both first, and its words are carried.
//!
//! Of `counted` parameters ranks count who has a gradient: a byte for each follows the settings (whether this rank has one; in
//! whole words, filled with 0), the step and what was decided (whether any rank has, so that the parameter is updated).

use crate::{LossScale, LossScaleState, Norm};

/// What a step is taken with, and what it needs to know of the run and of this rank.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Settings {
    /// Learning rate, for [`Step::lr`](super::Step::lr).
    pub lr: f64,
    /// The largest norm the gradients may have; infinite: any.
    pub max_norm: f64,
    /// The caller's factor on every gradient.
    pub grad_scale: f64,
    /// Micro-batches of the step.
    pub batches: u64,
    /// A count of collectives, compared between ranks.
    pub launches: u64,
    /// A digest of the rules' hyperparameters, compared between ranks.
    pub rules: u64,
    /// This rank.
    pub rank: u64,
    /// Weight of this rank's micro-batches.
    pub weight: u64,
    /// A number that adds up to 0 over all ranks, without carry, where those that compute the same micro-batches have weighed them
    /// alike.
    pub balance: u64,
    /// What this rank lacks, as a word; larger is graver; 0: nothing.
    pub fault: u64,
    /// Ranks.
    pub world_size: u64,
    /// Parameters that all ranks have a gradient for, or none: as many as are counted; 0: that is not asked.
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
    /// Not 0: the loss scale follows overflows.
    pub dynamic: u32,
    /// How gradients become one: 0 the mean over micro-batches, 1 the sum, 2 divided by the weights' sum.
    pub combine: u32,
    /// [`norm_code`] of the norm that is clipped and reported.
    pub norm: u32,
    /// Not 0: `max_norm` limits the combined gradient.
    pub clips: u32,
    /// Steps that may be skipped in a row with no hope for a lower loss scale.
    pub max_skips: u32,
    /// For [`Step::zero_grads`](super::Step::zero_grads).
    pub zero_grads: u32,
    /// Not 0: a step is taken whatever the gradients hold; where not all of them are finite their norm is infinite.
    pub propagates: u64,
}

impl Default for Settings {
    /// One rank's one micro-batch at the rate 0, any norm, no skip too many, a loss scale that stays.
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
    /// The same with this rule for the loss scale.
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

/// What goes on from step to step, on the device.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Progress {
    /// Steps taken or skipped.
    pub steps: u64,
    /// The loss scale of the coming step; 1 where there is none.
    pub scale: f64,
    /// [`LossScaleState::growth_tracker`].
    pub growth_tracker: u64,
    /// [`LossScaleState::hysteresis_tracker`].
    pub hysteresis_tracker: u64,
    /// Steps skipped in a row.
    pub skips: u32,
    /// Of these, those in a row after which the loss scale could not fall.
    pub skips_at_min_scale: u32,
}

impl Progress {
    /// Before the first step, or after `steps`, with the state of the loss scale.
    pub fn new(steps: u64, loss_scale: Option<LossScaleState>) -> Self {
        let (scale, growth_tracker, hysteresis_tracker) =
            loss_scale.map_or((1.0, 0, 0), |s| (s.scale, s.growth_tracker, s.hysteresis_tracker));
        Progress { steps, scale, growth_tracker, hysteresis_tracker, skips: 0, skips_at_min_scale: 0 }
    }

    /// The state of the loss scale, where there is one.
    pub fn loss_scale(&self) -> LossScaleState {
        let Progress { scale, growth_tracker, hysteresis_tracker, .. } = *self;
        LossScaleState { scale, growth_tracker, hysteresis_tracker }
    }
}

/// Words that must be the same on every rank, in this order: [`Progress::steps`], the bits of [`Settings::lr`], `max_norm`,
/// `grad_scale` and [`Progress::scale`], the loss scale's two trackers, [`Settings::batches`], `launches`, `rules`.
pub const FIELDS: usize = 10;

/// What a step's exchange led to, the same on every rank.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Decided {
    /// The norm of the whole combined gradient, before clipping, where the step was applied.
    pub norm: f64,
    /// What the combined gradient was scaled by to clip it.
    pub coef: f64,
    /// Gradient elements that were not finite.
    pub non_finite: u64,
    /// All ranks' weight.
    pub weight: u64,
    /// The gravest fault of all ranks; where they are [`Verdict::Uneven`], that of the lowest one without the gradient.
    pub fault: u64,
    /// The first parameter that some ranks have a gradient for and some do not; where they are [`Verdict::Parted`], the first of
    /// [`FIELDS`] that differs.
    pub param: u64,
    /// What this rank has of that field, the one thing here that is not the same on every rank.
    pub mine: u64,
    /// The smallest of all ranks.
    pub smallest: u64,
    /// The largest.
    pub largest: u64,
    /// Index in [`Verdict::ALL`].
    pub verdict: u32,
    /// Steps skipped in a row, this one included, where it was skipped.
    pub in_a_row: u32,
}

/// How a step ended. Those from `Faulty` on are errors that every rank has alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Parameters and state are one step further.
    Applied,
    /// Some gradient was not finite.
    Skipped,
    /// A rank lacked something: [`Decided::fault`].
    Faulty,
    /// Ranks were given different things.
    Parted,
    /// Some ranks have a gradient for [`Decided::param`] and some do not.
    Uneven,
    /// Gradients are weighted, and all weights are 0.
    Weightless,
    /// One step too many was skipped in a row.
    TooManySkips,
    /// What would be clipped is no number.
    NoNorm,
    /// The sum of [`Settings::balance`] is not 0.
    Unbalanced,
}

impl Verdict {
    /// In the order of their numbers.
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

/// How kernels call a norm; none has [`Norm::P`].
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
