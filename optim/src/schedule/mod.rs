//! Learning rate as a pure function of the step: Hugging Face's and PyTorch's schedules, with their names and formulas.
//!
//! | curve | source |
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
//! PyTorch's schedules get a warm-up by [`Schedule::after_warmup`], which is `SequentialLR([LinearLR, ...])`.
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
//! PyTorch's curves:
//!
//! ```
//! use meshstep_optim::schedule::{Anneal, ConstantLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, Curve, ExponentialLR};
//! use meshstep_optim::schedule::{LinearLR, MultiStepLR, OneCycleLR, PolynomialLR};
//!
//! let at = |curve: &dyn Curve, step| curve.at(0.8, step); // `Schedule::new` also checks the curve
//! assert_eq!(at(&MultiStepLR { milestones: vec![10, 20], gamma: 0.5 }, 20), 0.2);
//! assert_eq!(at(&ExponentialLR { gamma: 0.5 }, 2), 0.2);
//! assert_eq!(at(&ConstantLR { factor: 0.5, total_iters: 5 }, 4), 0.4);
//! assert_eq!(at(&LinearLR { start_factor: 0.5, end_factor: 1.0, total_iters: 4 }, 2), 0.8 * 0.75);
//! assert_eq!(at(&PolynomialLR { total_iters: 4, power: 2.0 }, 2), 0.2);
//! assert_eq!(at(&CosineAnnealingLR { t_max: 10, eta_min: 0.0 }, 5), 0.4);
//! assert_eq!(at(&CosineAnnealingWarmRestarts { t_0: 5, t_mult: 2, eta_min: 0.0 }, 15), 0.8); // the second restart
//! let cycle = OneCycleLR { anneal_strategy: Anneal::Linear, ..OneCycleLR::new(100) };
//! assert_eq!(at(&cycle, 0), 0.8 / 25.0);
//! ```
//!
//! Hugging Face's:
//!
//! ```
//! use meshstep_optim::schedule::{Constant, ConstantWithWarmup, Curve, InverseSqrt, Linear, Polynomial};
//! use meshstep_optim::schedule::{CosineWarmupWithMinLr, CosineWithMinLr, CosineWithRestarts, MinLr, Ramp, WarmupStableDecay};
//!
//! let (warm, all) = (10, 110);
//! let min = MinLr::Rate(0.1);
//! let stable = WarmupStableDecay { decay_type: Ramp::OneMinusSqrt, ..WarmupStableDecay::new(warm, 50, 50) };
//! let curves: [(&dyn Curve, f64); 9] = [
//!     (&Constant, 1e-3),
//!     (&ConstantWithWarmup { num_warmup_steps: warm }, 1e-3),
//!     (&Linear { num_warmup_steps: warm, num_training_steps: all }, 0.0),
//!     (&InverseSqrt { num_warmup_steps: warm, timescale: None }, 1e-3 / 11f64.sqrt()),
//!     (&Polynomial::new(warm, all), 1e-7),
//!     (&CosineWithRestarts::new(warm, all), 0.0),
//!     (&CosineWithMinLr::new(warm, all, min), 1e-4),
//!     (&CosineWarmupWithMinLr::new(warm, all, min), 1e-4),
//!     (&stable, 0.0),
//! ];
//! for (curve, last) in curves {
//!     curve.check(1e-3)?;
//!     assert!((curve.at(1e-3, all) - last).abs() < 1e-6, "{curve:?} ends at {}", curve.at(1e-3, all));
//! }
//! # Ok::<(), meshstep_optim::Error>(())
//! ```
//!
//! # Steps
//!
//! Steps count from 0, as in both libraries: the first update uses `at(0)`. A rule's `t` counts from 1, so the update that sets a
//! parameter's count to `t` uses `at(t - 1)`. The caller decides if a skipped step counts.
//!
//! # Exactness
//!
//! Every formula follows its source's order of operations in f64; cosines, powers and roots are `libm`'s, so all platforms and all ranks
//! get the same bits. Results agree with recorded values of transformers 4.57.1 and of PyTorch 2.11.0's closed forms to 1e-15 of the base
//! rate (the cosines of two libraries may differ by an ulp). PyTorch's stepping recursions drift from its own closed forms by some ulps a
//! step; results agree with these to 1e-12.

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
use crate::engine::check::Check;
use std::fmt::Debug;
use std::sync::Arc;

/// Base learning rate and curve, checked. A pure function of the step; clones share the curve.
#[derive(Clone, Debug)]
pub struct Schedule {
    lr: f64,
    curve: Arc<dyn Curve>,
    warmup: Option<Warmup>,
}

/// Shape of a learning rate over the steps.
pub trait Curve: Debug + Send + Sync {
    /// Returns the name of the curve for errors.
    fn name(&self) -> &'static str;

    /// Checks that the parameters are in range for a valid base learning rate.
    fn check(&self, lr: f64) -> Result<(), Error>;

    /// Returns the learning rate of a step, counted from 0. Only called after `check` passed.
    fn at(&self, lr: f64, step: u64) -> f64;
}

#[derive(Clone, Copy, Debug)]
struct Warmup {
    steps: u64,
    start_factor: f64,
}

impl Schedule {
    /// Creates a schedule, after checking the base learning rate `lr` (PyTorch's `max_lr` for [`OneCycleLR`]) and the curve's parameters.
    pub fn new(lr: f64, curve: impl Curve + 'static) -> Result<Self, Error> {
        Check { rule: curve.name() }.at_least_zero("lr", lr)?;
        curve.check(lr)?;
        Ok(Schedule { lr, curve: Arc::new(curve), warmup: None })
    }

    /// Adds a warm-up, as `SequentialLR([LinearLR(start_factor, total_iters = steps), self], milestones = [steps])`: the rate grows
    /// linearly from the base learning rate times `start_factor` to the base learning rate, then this schedule starts at its step 0.
    ///
    /// `start_factor` is above 0 and at most 1. A second warm-up replaces the first.
    pub fn after_warmup(self, steps: u64, start_factor: f64) -> Result<Self, Error> {
        let good = start_factor > 0.0 && start_factor <= 1.0;
        Check { rule: "warm-up" }.range("start_factor", start_factor, good, "a number above 0, at most 1")?;
        Ok(Schedule { warmup: Some(Warmup { steps, start_factor }), ..self })
    }

    /// Returns the learning rate of a step, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        match self.warmup {
            Some(Warmup { steps, start_factor }) if step < steps => {
                torch::linear(self.lr, start_factor, 1.0, steps, step)
            }
            Some(Warmup { steps, .. }) => self.curve.at(self.lr, step - steps),
            None => self.curve.at(self.lr, step),
        }
    }

    /// Returns all parameters by name, for comparison between ranks.
    pub fn parameters(&self) -> [(&'static str, String); 3] {
        let warmup = self.warmup.map_or("none".to_owned(), |warmup| format!("{warmup:?}"));
        [("lr", format!("{:?}", self.lr)), ("curve", format!("{:?}", self.curve)), ("warm-up", warmup)]
    }

    /// Returns the base learning rate.
    pub fn lr(&self) -> f64 {
        self.lr
    }
}

/// Returns `a / max(1, b)`: a ratio of counts that is finite for a phase without steps.
fn ratio(a: u64, b: u64) -> f64 {
    a as f64 / b.max(1) as f64
}

/// Returns an error if a count used as divisor is 0.
fn at_least_one(curve: &impl Curve, name: &'static str, count: u64) -> Result<(), Error> {
    Check { rule: curve.name() }.range(name, count as f64, count > 0, "1 or more")
}
