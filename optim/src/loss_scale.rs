//! Loss scaling: a factor on the loss that keeps 16-bit gradients from vanishing, and its reaction to overflows.
//!
//! A step multiplies its loss by the scale and divides its gradients by *the same* scale. Only then the scale changes for the next step:
//! halved after an overflow, doubled after enough steps without one. [`LossScale`] is the rule, [`LossScaleState`] the state, which is
//! plain data to save and restore.
//!
//! The table has the scales of eighteen steps with overflows in the pattern 110001000001110000, with `growth_interval: 2` and otherwise
//! the defaults, for two values of `hysteresis`. The last row is the scale of the nineteenth step:
//!
//! | step | overflow | hysteresis 1 | hysteresis 2 |
//! |---:|---:|---:|---:|
//! | 1 | 1 | 65536 | 65536 |
//! | 2 | 1 | 32768 | 65536 |
//! | 3 | 0 | 16384 | 32768 |
//! | 4 | 0 | 16384 | 32768 |
//! | 5 | 0 | 32768 | 65536 |
//! | 6 | 1 | 32768 | 65536 |
//! | 7 | 0 | 16384 | 65536 |
//! | 8 | 0 | 16384 | 65536 |
//! | 9 | 0 | 32768 | 131072 |
//! | 10 | 0 | 32768 | 131072 |
//! | 11 | 0 | 65536 | 262144 |
//! | 12 | 1 | 65536 | 262144 |
//! | 13 | 1 | 32768 | 262144 |
//! | 14 | 1 | 16384 | 131072 |
//! | 15 | 0 | 8192 | 65536 |
//! | 16 | 0 | 8192 | 65536 |
//! | 17 | 0 | 16384 | 131072 |
//! | 18 | 0 | 16384 | 131072 |
//! | 19 |   | 32768 | 262144 |
//!
//! With `hysteresis: 1` this is PyTorch's `GradScaler`, which has no minimum; with more, Megatron's `DynamicGradScaler`: once the
//! tolerated overflows are used up, every further one lowers the scale, until a growth renews them. PyTorch multiplies in f32, this crate
//! in f64: the results are equal for powers of two.

use crate::Error;
use crate::engine::check::Check;
use std::ops::RangeInclusive;

/// Valid scales: f32 holds their inverses with room for clipping and weights.
const SCALES: RangeInclusive<f64> = 1e-24..=1e24;

/// Rule of the loss scale, checked by [`check`](Self::check).
///
/// ```
/// use meshstep_optim::{DynamicLossScale, LossScale};
///
/// let rule = LossScale::Dynamic(DynamicLossScale { growth_interval: 2, ..DynamicLossScale::default() });
/// let mut state = rule.start();
/// let mut used = Vec::new();
/// for overflow in [true, true, false, false, false] {
///     used.push(state.scale);
///     rule.update(&mut state, overflow);
/// }
/// assert_eq!(used, [65536.0, 32768.0, 16384.0, 16384.0, 32768.0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// Constant scale.
    Static(f64),
    /// Scale that reacts to overflows.
    Dynamic(DynamicLossScale),
}

/// Scale that grows while nothing overflows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicLossScale {
    /// Scale of the first step.
    pub init_scale: f64,
    /// Factor on the scale after `growth_interval` steps without an overflow; above 1.
    pub growth_factor: f64,
    /// Factor on the scale after an overflow; above 0, below 1.
    pub backoff_factor: f64,
    /// Number of consecutive steps without an overflow before the scale grows; at least 1. The scale never exceeds 1e24.
    pub growth_interval: u64,
    /// Number of overflows since the last growth from which on each one lowers the scale; at least 1.
    pub hysteresis: u64,
    /// Minimum scale; at most `init_scale`.
    pub min_scale: f64,
}

/// State of the loss scale, which changes from step to step.
///
/// ```
/// use meshstep_optim::{DynamicLossScale, LossScale, LossScaleState};
///
/// let rule = LossScale::Dynamic(DynamicLossScale::default());
/// let saved = LossScaleState { scale: 1024.0, growth_tracker: 7, hysteresis_tracker: 1 };
/// assert!(rule.check_state(&saved).is_ok() && LossScale::Static(2.0).check_state(&saved).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaleState {
    /// Scale of the next step.
    pub scale: f64,
    /// Consecutive steps without an overflow since the scale last grew.
    pub growth_tracker: u64,
    /// Overflows left before one lowers the scale.
    pub hysteresis_tracker: u64,
}

impl Default for DynamicLossScale {
    /// PyTorch's defaults: start at 65536, double after 2000 steps, halve at every overflow. The minimum is Megatron's, 1: gradients that
    /// overflow unscaled overflow for another reason.
    fn default() -> Self {
        DynamicLossScale {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            hysteresis: 1,
            min_scale: 1.0,
        }
    }
}

impl LossScale {
    /// Checks that the parameters are in range.
    pub fn check(&self) -> Result<(), Error> {
        match self {
            LossScale::Static(scale) => in_range("scale", *scale),
            LossScale::Dynamic(dynamic) => dynamic.check(),
        }
    }

    /// Returns the state before the first step.
    pub fn start(&self) -> LossScaleState {
        match *self {
            LossScale::Static(scale) => LossScaleState { scale, growth_tracker: 0, hysteresis_tracker: 0 },
            LossScale::Dynamic(DynamicLossScale { init_scale, hysteresis, .. }) => {
                LossScaleState { scale: init_scale, growth_tracker: 0, hysteresis_tracker: hysteresis }
            }
        }
    }

    /// Checks that this rule can continue from a saved state. A static rule accepts only its own scale.
    pub fn check_state(&self, state: &LossScaleState) -> Result<(), Error> {
        in_range("scale", state.scale)?;
        let (good, works) = match self {
            LossScale::Static(scale) => (state.scale == *scale, "the static scale itself"),
            LossScale::Dynamic(d) => (state.scale >= d.min_scale, "a scale not below min_scale"),
        };
        CHECK.range("scale", state.scale, good, works)?;
        let LossScale::Dynamic(dynamic) = self else { return Ok(()) };
        let left = state.hysteresis_tracker;
        let good = left <= dynamic.hysteresis;
        CHECK.range("hysteresis_tracker", left as f64, good, "a count not above hysteresis")
    }

    /// Updates the state after the step that used `state.scale`.
    pub fn update(&self, state: &mut LossScaleState, overflow: bool) {
        let LossScale::Dynamic(dynamic) = self else { return };
        if overflow {
            dynamic.back_off(state);
        } else {
            dynamic.grow(state);
        }
    }

    /// Returns true if an overflow may lower the scale: false if it is static or at its minimum.
    pub fn can_fall(&self, state: &LossScaleState) -> bool {
        matches!(self, LossScale::Dynamic(dynamic) if state.scale > dynamic.min_scale)
    }
}

impl DynamicLossScale {
    fn check(&self) -> Result<(), Error> {
        in_range("init_scale", self.init_scale)?;
        in_range("min_scale", self.min_scale)?;
        let good = self.min_scale <= self.init_scale;
        CHECK.range("min_scale", self.min_scale, good, "a number not above init_scale")?;
        let growth = self.growth_factor;
        CHECK.range(
            "growth_factor",
            growth,
            growth > 1.0 && growth.is_finite(),
            "a finite number above 1",
        )?;
        let backoff = self.backoff_factor;
        CHECK.range(
            "backoff_factor",
            backoff,
            backoff > 0.0 && backoff < 1.0,
            "a number above 0, below 1",
        )?;
        for (name, count) in [("growth_interval", self.growth_interval), ("hysteresis", self.hysteresis)] {
            CHECK.range(name, count as f64, count > 0, "1 or more")?;
        }
        Ok(())
    }

    fn back_off(&self, state: &mut LossScaleState) {
        state.growth_tracker = 0;
        state.hysteresis_tracker = state.hysteresis_tracker.saturating_sub(1);
        if state.hysteresis_tracker == 0 {
            state.scale = (state.scale * self.backoff_factor).max(self.min_scale);
        }
    }

    fn grow(&self, state: &mut LossScaleState) {
        state.growth_tracker = state.growth_tracker.saturating_add(1);
        // Not an exact match: the state may come from a run with a longer interval.
        if state.growth_tracker < self.growth_interval {
            return;
        }
        let larger = state.scale * self.growth_factor;
        if SCALES.contains(&larger) {
            state.scale = larger;
        }
        state.growth_tracker = 0;
        state.hysteresis_tracker = self.hysteresis;
    }
}

const CHECK: Check = Check { rule: "loss scale" };

fn in_range(name: &'static str, scale: f64) -> Result<(), Error> {
    CHECK.range(name, scale, SCALES.contains(&scale), "a number from 1e-24 to 1e24")
}
