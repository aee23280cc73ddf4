//! Adam as in proofs about local updates (Cheng and Glasgow, *Convergence of Distributed Adaptive Optimization with Local Updates*, 2025;
//! *DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models*, 2025): without bias correction of the
//! moments, with lambda^2 under the root, and with optional clipping of each gradient element.
//!
//! One IEEE sequence per element, in the type of the parameters:
//!
//! ```text
//! g1  = g * scale                         grad_scale, negated to maximise
//! g1  = fma(wd, p, g1)                    coupled decay only
//! g1  = within -clip..clip                NaN stays NaN
//! m   = fma(w1, g1 - m, m)                w1 = 1 - beta1
//! v   = fma(w2 * g1, g1, b2 * v)          w2 = 1 - beta2, b2 = beta2
//! den = sqrt(v + l2)                      l2 = lambda^2
//! p   = p - fma(lw, p, (lr * m) / den)    lw: the decay's share, 0 if coupled
//! ```

mod kernel;
mod reference;

use crate::engine::check::Check;
use crate::engine::frame::{Frame, common, update_on};
use crate::engine::pass::PassKind;
use crate::precision::number::Real;
use crate::{Decay, Error, Rule, Scalars, Segment, StateSlot, cuda};

/// Adam without bias correction: no step depends on its number, so workers may average the moments at any time.
#[derive(Clone, Debug, PartialEq)]
pub struct UncorrectedAdam {
    /// Decay of the first moment, in `[0, 1)`.
    pub beta1: f64,
    /// Decay of the second moment, in `[0, 1)`.
    pub beta2: f64,
    /// The square of this is added to the second moment; at least 0.
    pub lambda: f64,
    /// Largest magnitude of a gradient element, above 0; infinite for no clipping.
    pub clip: f64,
    /// Decay of the parameters; at least 0.
    pub weight_decay: f64,
    /// Form of weight decay.
    pub decay: Decay,
    /// Maximises instead of minimising.
    pub maximize: bool,
}

impl Default for UncorrectedAdam {
    /// Adam's betas, lambda 1e-8, no clipping, and decoupled decay if `weight_decay` is set.
    fn default() -> Self {
        UncorrectedAdam {
            beta1: 0.9,
            beta2: 0.999,
            lambda: 1e-8,
            clip: f64::INFINITY,
            weight_decay: 0.0,
            decay: Decay::Decoupled,
            maximize: false,
        }
    }
}

impl UncorrectedAdam {
    common!();
}

impl Rule for UncorrectedAdam {
    fn name(&self) -> &'static str {
        "uncorrected_adam"
    }

    fn state(&self) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn check(&self) -> Result<(), Error> {
        let check = Check { rule: "uncorrected_adam" };
        check.beta("beta1", self.beta1)?;
        check.beta("beta2", self.beta2)?;
        check.at_least_zero("lambda", self.lambda)?;
        check.range("clip", self.clip, self.clip > 0.0, "a number above 0, infinite for no clipping")?;
        self.common().check(&check)
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        let Self { beta1, beta2, lambda, clip, .. } = *self;
        self.common().tell(&[("beta1", beta1), ("beta2", beta2), ("lambda", lambda), ("clip", clip)], each);
    }

    fn slot(&self, slot: usize) -> StateSlot {
        match slot {
            0 => StateSlot::average(self.beta1),
            _ => StateSlot::average(self.beta2).of_squares(),
        }
    }

    fn on_device(&self) -> Option<cuda::Hyper> {
        let Self { beta1, beta2, lambda, clip, .. } = *self;
        Some(cuda::Hyper::new("uncorrected", &self.common(), &[beta1, beta2, lambda, clip]))
    }

    update_on!(or 2);
}

/// Constants of the sequence above, for one step.
#[derive(Clone, Copy)]
pub(crate) struct Constants<T> {
    frame: Frame<T>,
    clip: T,
    minus_clip: T,
    w1: T,
    b2: T,
    w2: T,
    l2: T,
    lr: T,
}

impl PassKind<2> for UncorrectedAdam {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, _: &Segment) -> Constants<T> {
        Constants {
            frame: self.common().at(scalars.lr, scalars),
            clip: T::from_f64(self.clip),
            minus_clip: T::from_f64(-self.clip),
            w1: T::from_f64(1.0 - self.beta1),
            b2: T::from_f64(self.beta2),
            w2: T::from_f64(1.0 - self.beta2),
            l2: T::from_f64(self.lambda * self.lambda),
            lr: T::from_f64(scalars.lr),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_the_device_are_the_host_s() {
        let fully = Decay::FullyDecoupled { lr_max: 0.3 };
        let rules = [
            UncorrectedAdam { weight_decay: 0.1, ..UncorrectedAdam::default() },
            UncorrectedAdam {
                lambda: 0.3,
                clip: 0.7,
                weight_decay: 0.1,
                decay: fully,
                ..UncorrectedAdam::default()
            },
        ];
        for rule in rules {
            cuda::tests::constants_equal(&rule, |scalars, segment| {
                let c = rule.constants::<f64>(scalars, segment);
                vec![c.frame.lw, c.w1, c.b2, c.w2, c.l2, c.clip, c.lr]
            });
        }
    }
}
