//! LARS: You, Gitman and Ginsburg, *Large batch training of convolutional networks* (2017).
//!
//! One IEEE sequence per element, in the type of the parameters:
//!
//! ```text
//! g1 = g * scale                           grad_scale, negated to maximise
//! d  = fma(wd, p, g1)                      wd = weight_decay
//! b  = fma(mu, b, local * d)               mu = momentum; local = lr * ratio
//! p  = p - b
//! ```
//!
//! with `ratio = trust_coefficient * |p| / (|g1| + weight_decay * |p|)`, norms over the whole tensor. The ratio is 1 if |p| or the
//! denominator is 0 or not finite, or if it exceeds 1e30. Norms are exact sums, so cuts of the tensor do not change a bit. The learning
//! rate is inside the buffer, as in the paper: a change takes effect over `1 / (1 - momentum)` steps.

mod kernel;
mod reference;

use crate::engine::check::Check;
use crate::engine::cpu::Cpu;
use crate::engine::pass::{PassKind, pass};
use crate::norm::tensor_sums::{measure, usable_ratio};
use crate::precision::number::Real;
use crate::{Error, Flat, Isa, Rule, Scalars, Sees, Segment, StateSlot, TensorSums};
use meshstep_tensor::Queue;

const NAME: &str = "lars";
const STATE: &[&str] = &["momentum"];

/// LARS: SGD with momentum and a step in each tensor that is proportional to the norm of the tensor's parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Lars {
    /// Decay of the buffer; at least 0.
    pub momentum: f64,
    /// Weight of the penalty `weight_decay / 2 * |p|^2`; at least 0.
    pub weight_decay: f64,
    /// Length of a step relative to the parameters at lr 1; above 0.
    pub trust_coefficient: f64,
    /// Maximises instead of minimising.
    pub maximize: bool,
}

impl Default for Lars {
    /// The paper's defaults.
    fn default() -> Self {
        Lars { momentum: 0.9, weight_decay: 5e-4, trust_coefficient: 1e-3, maximize: false }
    }
}

/// Constants of the sequence above, for one segment.
#[derive(Clone, Copy)]
pub(crate) struct Constants<T> {
    scale: T,
    wd: T,
    mu: T,
    local: T,
}

impl Rule for Lars {
    fn name(&self) -> &'static str {
        NAME
    }

    fn state(&self) -> &'static [&'static str] {
        STATE
    }

    fn check(&self) -> Result<(), Error> {
        let check = Check { rule: NAME };
        check.at_least_zero("momentum", self.momentum)?;
        check.at_least_zero("weight_decay", self.weight_decay)?;
        let trust = self.trust_coefficient;
        let good = trust > 0.0 && (trust as f32).is_finite();
        check.range("trust_coefficient", trust, good, "a number > 0 that f32 can hold")
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        let all = [
            ("momentum", self.momentum),
            ("weight_decay", self.weight_decay),
            ("trust_coefficient", self.trust_coefficient),
            ("maximize", self.maximize.into()),
        ];
        all.into_iter().for_each(|(name, value)| each(name, value));
    }

    fn sees(&self) -> Sees {
        Sees::TensorSums
    }

    fn slot(&self, _: usize) -> StateSlot {
        StateSlot::average(self.momentum)
    }

    fn measure_on(
        &self,
        isa: Isa,
        flat: &Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        sums: &mut [TensorSums],
        queue: &Queue,
    ) -> Result<(), Error> {
        self.check()?;
        let on = Cpu { isa, threads: queue.threads() };
        measure::<_, 1>(self, self, on, flat, segments, scalars, sums)
    }

    fn ratio(&self, sums: &TensorSums) -> f64 {
        let (params, gradient) = sums.norms();
        let under = gradient + self.weight_decay * params;
        usable_ratio(self.trust_coefficient * params, under)
    }

    fn update_on(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), Error> {
        self.check()?;
        pass::<1>(self, self, Cpu { isa, threads: queue.threads() }, flat, segments, scalars)
    }
}

impl PassKind<1> for Lars {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, segment: &Segment) -> Constants<T> {
        let sign = if self.maximize { -1.0 } else { 1.0 };
        Constants {
            scale: T::from_f64(sign * scalars.grad_scale),
            wd: T::from_f64(self.weight_decay),
            mu: T::from_f64(self.momentum),
            local: T::from_f64(scalars.lr * segment.ratio),
        }
    }
}
