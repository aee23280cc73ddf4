//! LAMB: You et al., *Large batch optimization for deep learning: training BERT in 76 minutes* (2020), with bias
//! correction and the identity as its scaling function.
//!
//! One IEEE sequence per element, in the type of the parameters:
//!
//! ```text
//! g1  = g * scale                          grad_scale, negated to maximise
//! m   = fma(w1, g1 - m, m)                 w1 = 1 - beta1
//! v   = fma(w2 * g1, g1, b2 * v)           w2 = 1 - beta2, b2 = beta2
//! den = sqrt(v) / bc2s + eps               bc2s = sqrt(1 - beta2^t)
//! r   = fma(wd, p, (k * m) / den)          the direction; k = 1 / (1 - beta1^t), wd = weight_decay
//! p   = fma(minus_lr, r, p)                minus_lr = -(lr * |p| / |r|), norms over the whole tensor
//! ```
//!
//! The ratio |p| / |r| is 1 if a norm is 0 or not finite, or if the ratio exceeds 1e30, as with almost vanishing gradients. Norms are
//! exact sums, so cuts of the tensor do not change a bit. LAMB without its ratio is AdamW. Clipping by the global norm, which some
//! implementations include, is part of the caller's `grad_scale` here.

mod kernel;
mod reference;

use crate::engine::check::Check;
use crate::engine::cpu::Cpu;
use crate::engine::pass::{PassKind, pass};
use crate::norm::tensor_sums::{measure, usable_ratio};
use crate::precision::number::{Real, power};
use crate::{Error, Flat, Isa, Rule, Scalars, Sees, Segment, StateSlot, TensorSums};
use meshstep_tensor::Queue;

const NAME: &str = "lamb";
const STATE: &[&str] = &["m", "v"];

/// LAMB: Adam with a step in each tensor that is proportional to the norm of the tensor's parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Lamb {
    /// Decay of the first moment, in `[0, 1)`.
    pub beta1: f64,
    /// Decay of the second moment, in `[0, 1)`.
    pub beta2: f64,
    /// Added to the root of the second moment; at least 0.
    pub eps: f64,
    /// Decay of the parameters, part of the direction; at least 0.
    pub weight_decay: f64,
    /// Maximises instead of minimising.
    pub maximize: bool,
}

impl Default for Lamb {
    fn default() -> Self {
        Lamb { beta1: 0.9, beta2: 0.999, eps: 1e-6, weight_decay: 0.01, maximize: false }
    }
}

/// Constants of the sequence above, for one segment.
#[derive(Clone, Copy)]
pub(crate) struct Constants<T: Real> {
    scale: T,
    w1: T,
    b2: T,
    w2: T,
    bc2s: T,
    bc2s_divisor: T::Divisor,
    eps: T,
    wd: T,
    k: T,
    minus_lr: T,
}

impl Rule for Lamb {
    fn name(&self) -> &'static str {
        NAME
    }

    fn state(&self) -> &'static [&'static str] {
        STATE
    }

    fn check(&self) -> Result<(), Error> {
        let check = Check { rule: NAME };
        check.range("beta1", self.beta1, (0.0..1.0).contains(&self.beta1), "0 <= beta1 < 1")?;
        check.range("beta2", self.beta2, (0.0..1.0).contains(&self.beta2), "0 <= beta2 < 1")?;
        check.at_least_zero("eps", self.eps)?;
        check.at_least_zero("weight_decay", self.weight_decay)
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        let all = [
            ("beta1", self.beta1),
            ("beta2", self.beta2),
            ("eps", self.eps),
            ("weight_decay", self.weight_decay),
            ("maximize", self.maximize.into()),
        ];
        all.into_iter().for_each(|(name, value)| each(name, value));
    }

    fn sees(&self) -> Sees {
        Sees::TensorSums
    }

    fn slot(&self, slot: usize) -> StateSlot {
        match slot {
            0 => StateSlot::average(self.beta1),
            _ => StateSlot::average(self.beta2).of_squares(),
        }
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
        measure::<_, 2>(self, self, on, flat, segments, scalars, sums)
    }

    fn ratio(&self, sums: &TensorSums) -> f64 {
        let (params, direction) = sums.norms();
        usable_ratio(params, direction)
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
        pass::<2>(self, self, Cpu { isa, threads: queue.threads() }, flat, segments, scalars)
    }
}

impl PassKind<2> for Lamb {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, &Segment { t, ratio, .. }: &Segment) -> Constants<T> {
        let sign = if self.maximize { -1.0 } else { 1.0 };
        let bc2s = T::from_f64((1.0 - power(self.beta2, t)).sqrt());
        Constants {
            scale: T::from_f64(sign * scalars.grad_scale),
            w1: T::from_f64(1.0 - self.beta1),
            b2: T::from_f64(self.beta2),
            w2: T::from_f64(1.0 - self.beta2),
            bc2s,
            bc2s_divisor: T::divisor(bc2s),
            eps: T::from_f64(self.eps),
            wd: T::from_f64(self.weight_decay),
            k: T::from_f64(1.0 / (1.0 - power(self.beta1, t))),
            minus_lr: T::from_f64(-(scalars.lr * ratio)),
        }
    }
}
