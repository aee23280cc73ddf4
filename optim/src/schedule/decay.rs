//! Hugging Face's schedules that are constant or decay without a cosine, after a linear warm-up.

use super::{Curve, ratio};
use crate::Error;
use crate::engine::check::Check;

/// `lr` at every step (`get_constant_schedule`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constant;

/// `lr * step / num_warmup_steps`, then `lr` (`get_constant_schedule_with_warmup`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConstantWithWarmup {
    /// Steps before `lr` is reached.
    pub num_warmup_steps: u64,
}

/// Linear warm-up from 0, then a linear decay to 0 at `num_training_steps` and after (`get_linear_schedule_with_warmup`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    /// Steps before `lr` is reached.
    pub num_warmup_steps: u64,
    /// Steps of the whole run.
    pub num_training_steps: u64,
}

/// Linear warm-up from 0, then `(lr - lr_end) * left^power + lr_end`, with `left` falling from 1 to 0 at `num_training_steps`; `lr_end`
/// after (`get_polynomial_decay_schedule_with_warmup`).
///
/// Refuses an `lr_end` not below `lr`, as Hugging Face does, and an end not after the warm-up, with which Hugging Face divides by zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Polynomial {
    /// Steps before `lr` is reached.
    pub num_warmup_steps: u64,
    /// Steps of the whole run; more than the warm-up's.
    pub num_training_steps: u64,
    /// Rate at the end, below `lr`.
    pub lr_end: f64,
    /// The exponent: finite, at least 0.
    pub power: f64,
}

/// Linear warm-up from 0, then `lr / sqrt((step + timescale - num_warmup_steps) / timescale)` (`get_inverse_sqrt_schedule`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InverseSqrt {
    /// Steps before `lr` is reached.
    pub num_warmup_steps: u64,
    /// Number of steps in which the rate falls by the square root of 2; `None`: that of the warm-up, or 10,000 without one.
    pub timescale: Option<u64>,
}

impl Polynomial {
    /// Creates the schedule with Hugging Face's defaults: `lr_end` 1e-7, `power` 1.
    pub fn new(num_warmup_steps: u64, num_training_steps: u64) -> Self {
        Polynomial { num_warmup_steps, num_training_steps, lr_end: 1e-7, power: 1.0 }
    }
}

impl Curve for Constant {
    fn name(&self) -> &'static str {
        "constant"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        Ok(())
    }

    fn at(&self, lr: f64, _: u64) -> f64 {
        lr
    }
}

impl Curve for ConstantWithWarmup {
    fn name(&self) -> &'static str {
        "constant_with_warmup"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        Ok(())
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        if step < self.num_warmup_steps { lr * ratio(step, self.num_warmup_steps) } else { lr }
    }
}

impl Curve for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        Ok(())
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        if step < self.num_warmup_steps {
            return lr * ratio(step, self.num_warmup_steps);
        }
        let decay = self.num_training_steps.saturating_sub(self.num_warmup_steps);
        lr * ratio(self.num_training_steps.saturating_sub(step), decay)
    }
}

impl Curve for Polynomial {
    fn name(&self) -> &'static str {
        "polynomial"
    }

    fn check(&self, lr: f64) -> Result<(), Error> {
        let check = Check { rule: self.name() };
        check.finite("lr_end", self.lr_end)?;
        check.range("lr_end", self.lr_end, (0.0..lr).contains(&self.lr_end), "a number >= 0 below lr")?;
        check.at_least_zero("power", self.power)?;
        let steps = self.num_training_steps;
        let good = steps > self.num_warmup_steps;
        check.range("num_training_steps", steps as f64, good, "more than num_warmup_steps")
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        if step < self.num_warmup_steps {
            return lr * ratio(step, self.num_warmup_steps);
        }
        if step > self.num_training_steps {
            return lr * (self.lr_end / lr);
        }
        let decay_steps = self.num_training_steps - self.num_warmup_steps;
        let left = 1.0 - ratio(step - self.num_warmup_steps, decay_steps);
        let decay = (lr - self.lr_end) * libm::pow(left, self.power) + self.lr_end;
        lr * (decay / lr)
    }
}

impl Curve for InverseSqrt {
    fn name(&self) -> &'static str {
        "inverse_sqrt"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        self.timescale.map_or(Ok(()), |steps| super::at_least_one(self, "timescale", steps))
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        let warmup = self.num_warmup_steps;
        if step < warmup {
            return lr * ratio(step, warmup);
        }
        let timescale = self.timescale.unwrap_or(if warmup > 0 { warmup } else { 10_000 });
        let shifted = (step - warmup) as f64 + timescale as f64;
        lr * (1.0 / (shifted / timescale as f64).sqrt())
    }
}
