//! Hugging Face's cosine schedules: to zero, with hard restarts, to a minimum.

use super::{Curve, ratio};
use crate::Error;
use crate::engine::check::Check;
use std::f64::consts::PI;

/// Linear warm-up from 0, then `lr / 2 (1 + cos(2 pi num_cycles progress))` (`get_cosine_schedule_with_warmup`).
///
/// As in Hugging Face's, the cosine continues after `num_training_steps`, so the rate rises again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cosine {
    /// Steps before `lr` is reached.
    pub num_warmup_steps: u64,
    /// Steps of the whole run.
    pub num_training_steps: u64,
    /// Number of waves: 0.5 falls to 0 once.
    pub num_cycles: f64,
}

/// Linear warm-up from 0, then half a cosine down to 0 for each cycle; 0 from `num_training_steps` on
/// (`get_cosine_with_hard_restarts_schedule_with_warmup`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CosineWithRestarts {
    /// Steps before `lr` is reached.
    pub num_warmup_steps: u64,
    /// Steps of the whole run.
    pub num_training_steps: u64,
    /// Number of times the cosine falls.
    pub num_cycles: u64,
}

/// Minimum rate of a cosine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MinLr {
    /// A learning rate (`min_lr`).
    Lr(f64),
    /// A fraction of the base learning rate (`min_lr_rate`).
    Rate(f64),
}

/// Linear warm-up from 0, then a cosine down to a minimum, reached at `num_training_steps`
/// (`get_cosine_with_min_lr_schedule_with_warmup`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CosineWithMinLr {
    /// Steps before `lr` is reached.
    pub num_warmup_steps: u64,
    /// Steps of the whole run.
    pub num_training_steps: u64,
    /// Number of waves: 0.5 falls to the minimum once.
    pub num_cycles: f64,
    /// The minimum.
    pub min_lr: MinLr,
}

/// [`CosineWithMinLr`] shifted by one step, so that no step has a rate of 0 and the last of `num_training_steps` has the minimum
/// (`get_cosine_with_min_lr_schedule_with_warmup_lr_rate`, which Hugging Face names `cosine_warmup_with_min_lr`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CosineWarmupWithMinLr {
    /// Number of warm-up steps; the last one has `lr`.
    pub num_warmup_steps: u64,
    /// Steps of the whole run.
    pub num_training_steps: u64,
    /// Number of waves: 0.5 falls to the minimum once.
    pub num_cycles: f64,
    /// The minimum.
    pub min_lr: MinLr,
    /// Fraction of `lr` in the first step; `None`: 1 / `num_warmup_steps`.
    pub warmup_lr_rate: Option<f64>,
}

impl Cosine {
    /// Creates the schedule with Hugging Face's default, half a wave.
    pub fn new(num_warmup_steps: u64, num_training_steps: u64) -> Self {
        Cosine { num_warmup_steps, num_training_steps, num_cycles: 0.5 }
    }
}

impl CosineWithRestarts {
    /// Creates the schedule with Hugging Face's default, one cycle.
    pub fn new(num_warmup_steps: u64, num_training_steps: u64) -> Self {
        CosineWithRestarts { num_warmup_steps, num_training_steps, num_cycles: 1 }
    }
}

impl CosineWithMinLr {
    /// Creates the schedule with Hugging Face's default, half a wave.
    pub fn new(num_warmup_steps: u64, num_training_steps: u64, min_lr: MinLr) -> Self {
        CosineWithMinLr { num_warmup_steps, num_training_steps, num_cycles: 0.5, min_lr }
    }
}

impl CosineWarmupWithMinLr {
    /// Creates the schedule with Hugging Face's defaults: half a wave, from 1 / `num_warmup_steps`.
    pub fn new(num_warmup_steps: u64, num_training_steps: u64, min_lr: MinLr) -> Self {
        let num_cycles = 0.5;
        CosineWarmupWithMinLr {
            num_warmup_steps,
            num_training_steps,
            num_cycles,
            min_lr,
            warmup_lr_rate: None,
        }
    }
}

impl MinLr {
    fn rate(self, lr: f64) -> f64 {
        match self {
            MinLr::Lr(min_lr) => min_lr / lr,
            MinLr::Rate(rate) => rate,
        }
    }

    fn check(self, check: &Check, lr: f64) -> Result<(), Error> {
        match self {
            MinLr::Lr(min_lr) => {
                let good = (0.0..=lr).contains(&min_lr) && lr > 0.0;
                check.range("min_lr", min_lr, good, "a number from 0 to lr, and an lr above 0")
            }
            MinLr::Rate(rate) => {
                check.range("min_lr_rate", rate, (0.0..=1.0).contains(&rate), "a number from 0 to 1")
            }
        }
    }
}

/// Returns a factor that falls from 1 to `min` in half a wave, with `waves` of them for a `progress` of 1.
fn wave(waves: f64, progress: f64, min: f64) -> f64 {
    let factor = 0.5 * (1.0 + libm::cos(PI * waves * 2.0 * progress));
    (factor * (1.0 - min) + min).max(0.0)
}

impl Curve for Cosine {
    fn name(&self) -> &'static str {
        "cosine"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        Check { rule: self.name() }.finite("num_cycles", self.num_cycles)
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        let Cosine { num_warmup_steps, num_training_steps, num_cycles } = *self;
        let min_lr = MinLr::Rate(0.0);
        CosineWithMinLr { num_warmup_steps, num_training_steps, num_cycles, min_lr }.at(lr, step)
    }
}

impl Curve for CosineWithRestarts {
    fn name(&self) -> &'static str {
        "cosine_with_restarts"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        super::at_least_one(self, "num_cycles", self.num_cycles)
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        if step < self.num_warmup_steps {
            return lr * ratio(step, self.num_warmup_steps);
        }
        let decay = self.num_training_steps.saturating_sub(self.num_warmup_steps);
        let progress = ratio(step - self.num_warmup_steps, decay);
        if progress >= 1.0 {
            return 0.0;
        }
        let fallen = (self.num_cycles as f64 * progress) % 1.0;
        lr * (0.5 * (1.0 + libm::cos(PI * fallen))).max(0.0)
    }
}

impl Curve for CosineWithMinLr {
    fn name(&self) -> &'static str {
        "cosine_with_min_lr"
    }

    fn check(&self, lr: f64) -> Result<(), Error> {
        let check = Check { rule: self.name() };
        check.finite("num_cycles", self.num_cycles)?;
        self.min_lr.check(&check, lr)
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        if step < self.num_warmup_steps {
            return lr * ratio(step, self.num_warmup_steps);
        }
        let decay = self.num_training_steps.saturating_sub(self.num_warmup_steps);
        let progress = ratio(step - self.num_warmup_steps, decay);
        lr * wave(self.num_cycles, progress, self.min_lr.rate(lr))
    }
}

impl Curve for CosineWarmupWithMinLr {
    fn name(&self) -> &'static str {
        "cosine_warmup_with_min_lr"
    }

    fn check(&self, lr: f64) -> Result<(), Error> {
        let check = Check { rule: self.name() };
        check.finite("num_cycles", self.num_cycles)?;
        let first = self.warmup_lr_rate.unwrap_or(0.0);
        check.range("warmup_lr_rate", first, (0.0..=1.0).contains(&first), "a number from 0 to 1")?;
        self.min_lr.check(&check, lr)
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        let warmup = self.num_warmup_steps;
        match self.warmup_lr_rate {
            None if step < warmup => lr * ratio(step + 1, warmup),
            Some(first) if step < warmup => {
                let span = (warmup - 1).max(1) as f64;
                lr * (first + (1.0 - first) * step as f64 / span)
            }
            _ => {
                let ahead = (step - warmup) as f64 + 1.0;
                let decay = self.num_training_steps.saturating_sub(warmup).max(1) as f64;
                lr * wave(self.num_cycles, ahead / decay, self.min_lr.rate(lr))
            }
        }
    }
}
