//! Lion (Chen et al., *Symbolic discovery of optimization algorithms*, 2023).
//!
//! One IEEE sequence per element, in the type of the parameters:
//!
//! ```text
//! g1 = g * scale                         grad_scale, negated to maximise
//! g1 = fma(wd, p, g1)                    coupled decay only
//! u  = fma(w1, g1 - m, m)                w1 = 1 - beta1
//! m  = fma(w2, g1 - m, m)                w2 = 1 - beta2, from the same m
//! p  = p - fma(lw, p, lr * sign(u))      lw: the decay's share, 0 if coupled; the sign of 0 is 0, of NaN NaN
//! ```

mod kernel;
mod reference;

use crate::engine::check::Check;
use crate::engine::frame::{Frame, common, update_on};
use crate::engine::pass::PassKind;
use crate::precision::number::Real;
use crate::{Decay, Error, Rule, Scalars, Segment, StateSlot, cuda};

/// Lion: steps of length `lr` in the direction of the sign of an average, with one state vector.
#[derive(Clone, Debug, PartialEq)]
pub struct Lion {
    /// Weight of the average in a step, in `[0, 1)`.
    pub beta1: f64,
    /// Decay of the average, in `[0, 1)`.
    pub beta2: f64,
    /// Decay of the parameters; at least 0.
    pub weight_decay: f64,
    /// Form of weight decay.
    pub decay: Decay,
    /// Maximises instead of minimising.
    pub maximize: bool,
}

impl Default for Lion {
    /// The paper's defaults, with decoupled decay if `weight_decay` is set.
    fn default() -> Self {
        Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.0, decay: Decay::Decoupled, maximize: false }
    }
}

impl Lion {
    common!();
}

impl Rule for Lion {
    fn name(&self) -> &'static str {
        "lion"
    }

    fn state(&self) -> &'static [&'static str] {
        &["m"]
    }

    fn check(&self) -> Result<(), Error> {
        let check = Check { rule: "lion" };
        check.beta("beta1", self.beta1)?;
        check.beta("beta2", self.beta2)?;
        self.common().check(&check)
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        self.common().tell(&[("beta1", self.beta1), ("beta2", self.beta2)], each);
    }

    fn slot(&self, _: usize) -> StateSlot {
        StateSlot::average(self.beta2)
    }

    fn on_device(&self) -> Option<cuda::Hyper> {
        Some(cuda::Hyper::new("lion", &self.common(), &[self.beta1, self.beta2]))
    }

    update_on!(or 1);
}

/// Constants of the sequence above, for one step.
#[derive(Clone, Copy)]
pub(crate) struct Constants<T> {
    frame: Frame<T>,
    w1: T,
    w2: T,
    lr: T,
    minus_lr: T,
}

impl PassKind<1> for Lion {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, _: &Segment) -> Constants<T> {
        Constants {
            frame: self.common().at(scalars.lr, scalars),
            w1: T::from_f64(1.0 - self.beta1),
            w2: T::from_f64(1.0 - self.beta2),
            lr: T::from_f64(scalars.lr),
            minus_lr: T::from_f64(-scalars.lr),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_the_device_are_the_host_s() {
        let rules = [
            Lion { weight_decay: 0.1, ..Lion::default() },
            Lion { weight_decay: 0.1, decay: Decay::FullyDecoupled { lr_max: 0.3 }, ..Lion::default() },
        ];
        for rule in rules {
            cuda::tests::constants_equal(&rule, |scalars, segment| {
                let c = rule.constants::<f64>(scalars, segment);
                vec![c.frame.lw, c.w1, c.w2, c.lr]
            });
        }
    }
}
