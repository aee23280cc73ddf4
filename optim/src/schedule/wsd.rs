//! Hugging Face's warm-up, stable, decay schedule.

use super::{Curve, ratio};
use crate::Error;
use crate::engine::check::Check;
use std::f64::consts::PI;

/// Interpolation between a minimum and the full rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ramp {
    /// `"linear"`: `p` up, `1 - p` down.
    Linear,
    /// `"cosine"`: `(1 - cos(pi p)) / 2` up, `(1 + cos(2 pi num_cycles p)) / 2` down.
    Cosine,
    /// `"1-sqrt"`: `1 - sqrt(1 - p)` up, `1 - sqrt(p)` down.
    OneMinusSqrt,
}

/// Rises from the minimum, stays constant, falls to the minimum and stays there (`get_wsd_schedule`; Hu et al., *MiniCPM*, 2024).
///
/// Hugging Face takes `num_training_steps`; `num_stable_steps` is the rest of it after warm-up and decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupStableDecay {
    /// Steps before `lr` is reached.
    pub num_warmup_steps: u64,
    /// Steps at `lr`.
    pub num_stable_steps: u64,
    /// Number of steps down to the minimum.
    pub num_decay_steps: u64,
    /// Interpolation of the rise.
    pub warmup_type: Ramp,
    /// Interpolation of the fall.
    pub decay_type: Ramp,
    /// Minimum as a fraction of `lr`.
    pub min_lr_ratio: f64,
    /// Number of waves of a cosine decay: 0.5 falls to the minimum once.
    pub num_cycles: f64,
}

impl WarmupStableDecay {
    /// Creates the schedule with Hugging Face's defaults: a linear rise, and a fall by half a cosine to 0.
    pub fn new(num_warmup_steps: u64, num_stable_steps: u64, num_decay_steps: u64) -> Self {
        WarmupStableDecay {
            num_warmup_steps,
            num_stable_steps,
            num_decay_steps,
            warmup_type: Ramp::Linear,
            decay_type: Ramp::Cosine,
            min_lr_ratio: 0.0,
            num_cycles: 0.5,
        }
    }

    fn above_min(&self, factor: f64) -> f64 {
        (factor * (1.0 - self.min_lr_ratio) + self.min_lr_ratio).max(0.0)
    }

    fn decayed(&self, step: u64) -> f64 {
        let p = ratio(step, self.num_decay_steps);
        self.above_min(match self.decay_type {
            Ramp::Linear => 1.0 - p,
            Ramp::Cosine => 0.5 * (1.0 + libm::cos(PI * self.num_cycles * 2.0 * p)),
            Ramp::OneMinusSqrt => 1.0 - p.sqrt(),
        })
    }
}

impl Curve for WarmupStableDecay {
    fn name(&self) -> &'static str {
        "warmup_stable_decay"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        let check = Check { rule: self.name() };
        check.finite("num_cycles", self.num_cycles)?;
        let ratio = self.min_lr_ratio;
        check.range("min_lr_ratio", ratio, (0.0..=1.0).contains(&ratio), "a number from 0 to 1")
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        let Some(after_warmup) = step.checked_sub(self.num_warmup_steps) else {
            let p = ratio(step, self.num_warmup_steps);
            return lr
                * self.above_min(match self.warmup_type {
                    Ramp::Linear => p,
                    Ramp::Cosine => 0.5 * (1.0 - libm::cos(PI * p)),
                    Ramp::OneMinusSqrt => 1.0 - (1.0 - p).sqrt(),
                });
        };
        match after_warmup.checked_sub(self.num_stable_steps) {
            None => lr,
            Some(decaying) if decaying < self.num_decay_steps => lr * self.decayed(decaying),
            Some(_) => lr * self.min_lr_ratio,
        }
    }
}
