//! The learning rate as a pure function of the step: Hugging Face's and PyTorch's schedules, named and computed as there.
//!
//! | curve | is |
//! |---|---|
//! | [`Constant`] | `get_constant_schedule` |
//! | [`ConstantWithWarmup`] | `get_constant_schedule_with_warmup` |
//! | [`Linear`] | `get_linear_schedule_with_warmup` |
//! | [`Cosine`] | `get_cosine_schedule_with_warmup` |
//! | [`CosineWithRestarts`] | `get_cosine_with_hard_restarts_schedule_with_warmup` |
//! | [`CosineWithMinLr`] | `get_cosine_with_min_lr_schedule_with_warmup` |
//! | [`CosineWarmupWithMinLr`] | `get_cosine_with_min_lr_schedule_with_warmup_lr_rate` |
//! | [`Polynomial`] | `get_polynomial_decay_schedule_with_warmup` |
//! | [`InverseSqrt`] | `get_inverse_sqrt_schedule` |
//! | [`WarmupStableDecay`] | `get_wsd_schedule` |
//! | [`StepLR`], [`MultiStepLR`], [`ExponentialLR`], [`PolynomialLR`], [`ConstantLR`], [`LinearLR`] | `torch.optim.lr_scheduler`'s |
//! | [`CosineAnnealingLR`], [`CosineAnnealingWarmRestarts`], [`OneCycleLR`] | `torch.optim.lr_scheduler`'s |
//!
//! PyTorch's get a warm-up by [`Schedule::after_warmup`], which is `SequentialLR([LinearLR, ...])`.
//!
//! ```
//! use meshstep_optim::schedule::{Cosine, Schedule, StepLR};
//!
//! let cosine = Schedule::new(1e-3, Cosine::new(10, 110))?;
//! assert_eq!((cosine.at(0), cosine.at(5), cosine.at(10), cosine.at(60)), (0.0, 5e-4, 1e-3, 5e-4));
//!
//! let step = Schedule::new(0.1, StepLR { step_size: 30, gamma: 0.5 })?.after_warmup(5, 0.2)?;
//! assert_eq!((step.at(0), step.at(5), step.at(34), step.at(35)), (0.1 * 0.2, 0.1, 0.1, 0.1 * 0.5));
//! # Ok::<(), meshstep_optim::Error>(())
//! ```
//!
//! # Steps
//!
//! Steps count from 0, as in both libraries: the first update takes `at(0)`. A rule's `t` counts from 1, so the update
//! that makes a parameter's count `t` takes `at(t - 1)`; a skipped step may or may not count, as the caller decides.
//!
//! # Exactness
//!
//! Every formula has its source's order of operations in f64; cosines, powers and roots are `libm`'s, so that all
//! platforms and all ranks get the same bits. Recorded values of transformers 4.57.1 and of PyTorch 2.11.0's closed forms
//! are met to 1e-15 of the base rate (the cosines of two libraries may differ by an ulp). PyTorch's stepping recursions
//! drift from its own closed forms by some ulps a step; these are met to 1e-12.

mod cosine;
mod decay;
mod one_cycle;
mod torch;
mod wsd;

pub use cosine::{Cosine, CosineWarmupWithMinLr, CosineWithMinLr, CosineWithRestarts, MinLr};
pub use decay::{Constant, ConstantWithWarmup, InverseSqrt, Linear, Polynomial};
pub use one_cycle::{Anneal, OneCycleLR};
pub use torch::{
    ConstantLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, ExponentialLR, LinearLR, MultiStepLR,
    PolynomialLR, StepLR,
};
pub use wsd::{Ramp, WarmupStableDecay};

use crate::Error;
use crate::check::Check;
use std::fmt::Debug;
use std::sync::Arc;

/// A base learning rate and the curve it follows, checked. A pure function of the step; clones share the curve.
#[derive(Clone, Debug)]
pub struct Schedule {
    lr: f64,
    curve: Arc<dyn Curve>,
    warmup: Option<Warmup>,
}

/// The shape of a learning rate over the steps.
pub trait Curve: Debug + Send + Sync {
    /// Its name in errors.
    fn name(&self) -> &'static str;

    /// Whether its parameters are in range, for a base learning rate that is.
    fn check(&self, lr: f64) -> Result<(), Error>;

    /// The learning rate of a step, counted from 0. Only called where `check` passed.
    fn at(&self, lr: f64, step: u64) -> f64;
}

#[derive(Clone, Copy, Debug)]
struct Warmup {
    steps: u64,
    start_factor: f64,
}

impl Schedule {
    /// The schedule, once the base learning rate `lr` (PyTorch's `max_lr` for [`OneCycleLR`]) and the curve's parameters
    /// are in range.
    pub fn new(lr: f64, curve: impl Curve + 'static) -> Result<Self, Error> {
        Check { rule: curve.name() }.at_least_zero("lr", lr)?;
        curve.check(lr)?;
        Ok(Schedule { lr, curve: Arc::new(curve), warmup: None })
    }

    /// `SequentialLR([LinearLR(start_factor, total_iters = steps), self], milestones = [steps])`: the base learning rate
    /// times `start_factor` at first, growing linearly to all of it, then this schedule from its step 0.
    ///
    /// `start_factor` is above 0 and at most 1. A second warm-up replaces the first.
    pub fn after_warmup(self, steps: u64, start_factor: f64) -> Result<Self, Error> {
        let good = start_factor > 0.0 && start_factor <= 1.0;
        Check { rule: "warm-up" }.range("start_factor", start_factor, good, "a number above 0, at most 1")?;
        Ok(Schedule { warmup: Some(Warmup { steps, start_factor }), ..self })
    }

    /// The learning rate of a step, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        match self.warmup {
            Some(Warmup { steps, start_factor }) if step < steps => {
                torch::linear(self.lr, start_factor, 1.0, steps, step)
            }
            Some(Warmup { steps, .. }) => self.curve.at(self.lr, step - steps),
            None => self.curve.at(self.lr, step),
        }
    }

    /// What it is made of, by name, with all that tells it from another: for ranks to compare.
    pub fn parameters(&self) -> [(&'static str, String); 3] {
        let warmup = self.warmup.map_or("none".to_owned(), |warmup| format!("{warmup:?}"));
        [("lr", format!("{:?}", self.lr)), ("curve", format!("{:?}", self.curve)), ("warm-up", warmup)]
    }

    /// The base learning rate.
    pub fn lr(&self) -> f64 {
        self.lr
    }
}

/// `a / max(1, b)`: a ratio of counts that a phase without steps does not divide by zero.
fn ratio(a: u64, b: u64) -> f64 {
    a as f64 / b.max(1) as f64
}

/// The error of a count that is 0 where it divides.
fn at_least_one(curve: &impl Curve, name: &'static str, count: u64) -> Result<(), Error> {
    Check { rule: curve.name() }.range(name, count as f64, count > 0, "1 or more")
}
