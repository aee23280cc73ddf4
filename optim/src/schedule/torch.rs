//! PyTorch's schedulers that have a closed form, by that closed form.

use super::{Curve, at_least_one};
use crate::Error;
use crate::engine::check::Check;
use std::f64::consts::PI;

/// `lr * gamma^(step / step_size)`, the quotient rounded down.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLR {
    /// Number of steps between two decays; at least 1.
    pub step_size: u64,
    /// Factor of one decay (PyTorch's default is 0.1).
    pub gamma: f64,
}

/// `lr * gamma^n`, with `n` the number of milestones at or before the step; a milestone listed twice counts twice.
#[derive(Clone, Debug, PartialEq)]
pub struct MultiStepLR {
    /// Steps of the decays, in any order.
    pub milestones: Vec<u64>,
    /// Factor of one decay (PyTorch's default is 0.1).
    pub gamma: f64,
}

/// `lr * gamma^step`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExponentialLR {
    /// Factor of one step.
    pub gamma: f64,
}

/// `lr * factor` for `total_iters` steps, then `lr`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConstantLR {
    /// Factor from 0 to 1 (PyTorch's default is 1/3).
    pub factor: f64,
    /// Number of steps with the factor (PyTorch's default is 5).
    pub total_iters: u64,
}

/// `lr` times a factor that goes linearly from `start_factor` to `end_factor` within `total_iters` steps and then stays constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearLR {
    /// First factor; above 0, at most 1 (PyTorch's default is 1/3).
    pub start_factor: f64,
    /// Last factor; from 0 to 1 (PyTorch's default is 1).
    pub end_factor: f64,
    /// Number of steps between both; at least 1 (PyTorch's default is 5).
    pub total_iters: u64,
}

/// `lr * (1 - min(step, total_iters) / total_iters)^power`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolynomialLR {
    /// Number of steps to 0; at least 1 (PyTorch's default is 5).
    pub total_iters: u64,
    /// Exponent: finite, at least 0 (PyTorch's default is 1).
    pub power: f64,
}

/// `eta_min + (lr - eta_min) (1 + cos(pi step / T_max)) / 2` (Loshchilov and Hutter, *SGDR*, 2017, without restarts). As in PyTorch, the
/// cosine continues after `t_max`, so the rate rises again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CosineAnnealingLR {
    /// Number of steps down to `eta_min` (`T_max`); at least 1.
    pub t_max: u64,
    /// Minimum rate (PyTorch's default is 0).
    pub eta_min: f64,
}

/// [`CosineAnnealingLR`] with a restart after `t_0` steps, then after `t_0 t_mult` more, and so on (*SGDR*).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CosineAnnealingWarmRestarts {
    /// Number of steps before the first restart (`T_0`); at least 1.
    pub t_0: u64,
    /// Ratio of a run's length to that of the previous one (`T_mult`); at least 1 (PyTorch's default is 1).
    pub t_mult: u64,
    /// Minimum rate (PyTorch's default is 0).
    pub eta_min: f64,
}

/// Computes `LinearLR`'s closed form.
pub(super) fn linear(lr: f64, start: f64, end: f64, total_iters: u64, step: u64) -> f64 {
    lr * (start + (end - start) * step.min(total_iters) as f64 / total_iters as f64)
}

fn power(base: f64, exponent: u64) -> f64 {
    libm::pow(base, exponent as f64)
}

fn cosine(lr: f64, eta_min: f64, step: u64, t_max: u64) -> f64 {
    eta_min + (lr - eta_min) * (1.0 + libm::cos(PI * step as f64 / t_max as f64)) / 2.0
}

impl Curve for StepLR {
    fn name(&self) -> &'static str {
        "StepLR"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        at_least_one(self, "step_size", self.step_size)?;
        Check { rule: self.name() }.at_least_zero("gamma", self.gamma)
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        lr * power(self.gamma, step / self.step_size)
    }
}

impl Curve for MultiStepLR {
    fn name(&self) -> &'static str {
        "MultiStepLR"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        Check { rule: self.name() }.at_least_zero("gamma", self.gamma)
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        let passed = self.milestones.iter().filter(|&&milestone| milestone <= step).count();
        lr * power(self.gamma, passed as u64)
    }
}

impl Curve for ExponentialLR {
    fn name(&self) -> &'static str {
        "ExponentialLR"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        Check { rule: self.name() }.at_least_zero("gamma", self.gamma)
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        lr * power(self.gamma, step)
    }
}

impl Curve for ConstantLR {
    fn name(&self) -> &'static str {
        "ConstantLR"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        let good = (0.0..=1.0).contains(&self.factor);
        Check { rule: self.name() }.range("factor", self.factor, good, "a number from 0 to 1")
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        let reached = if step >= self.total_iters { 1.0 } else { 0.0 };
        lr * (self.factor + reached * (1.0 - self.factor))
    }
}

impl Curve for LinearLR {
    fn name(&self) -> &'static str {
        "LinearLR"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        let check = Check { rule: self.name() };
        let good = self.start_factor > 0.0 && self.start_factor <= 1.0;
        check.range("start_factor", self.start_factor, good, "a number above 0, at most 1")?;
        let good = (0.0..=1.0).contains(&self.end_factor);
        check.range("end_factor", self.end_factor, good, "a number from 0 to 1")?;
        at_least_one(self, "total_iters", self.total_iters)
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        linear(lr, self.start_factor, self.end_factor, self.total_iters, step)
    }
}

impl Curve for PolynomialLR {
    fn name(&self) -> &'static str {
        "PolynomialLR"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        at_least_one(self, "total_iters", self.total_iters)?;
        Check { rule: self.name() }.at_least_zero("power", self.power)
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        let gone = step.min(self.total_iters) as f64 / self.total_iters as f64;
        lr * libm::pow(1.0 - gone, self.power)
    }
}

impl Curve for CosineAnnealingLR {
    fn name(&self) -> &'static str {
        "CosineAnnealingLR"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        at_least_one(self, "t_max", self.t_max)?;
        Check { rule: self.name() }.at_least_zero("eta_min", self.eta_min)
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        cosine(lr, self.eta_min, step, self.t_max)
    }
}

impl Curve for CosineAnnealingWarmRestarts {
    fn name(&self) -> &'static str {
        "CosineAnnealingWarmRestarts"
    }

    fn check(&self, _: f64) -> Result<(), Error> {
        at_least_one(self, "t_0", self.t_0)?;
        at_least_one(self, "t_mult", self.t_mult)?;
        Check { rule: self.name() }.at_least_zero("eta_min", self.eta_min)
    }

    fn at(&self, lr: f64, step: u64) -> f64 {
        let (mut since, mut len) = (step, self.t_0);
        if self.t_mult == 1 {
            since %= len;
        }
        // With `t_mult` above 1 runs at least double, so there are at most 64 of them.
        while since >= len {
            since -= len;
            len = len.saturating_mul(self.t_mult);
        }
        cosine(lr, self.eta_min, since, len)
    }
}
