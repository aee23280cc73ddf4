//! Adagrad (Duchi, Hazan and Singer, *Adaptive subgradient methods for online learning and stochastic optimization*,
//! 2011), with PyTorch's meaning of every hyperparameter.
//!
//! One IEEE sequence per element, in the type of the parameters:
//!
//! ```text
//! g1  = g * scale                          grad_scale, negated to maximise
//! g1  = fma(wd, p, g1)                     coupled decay only
//! sum = fma(g1, g1, sum)                   at t = 1 the sum before is initial_accumulator_value; stored values are ignored
//! p   = p - fma(lw, p, (clr * g1) / den)   den = sqrt(sum) + eps; clr = lr / (1 + (t - 1) lr_decay)
//! ```
//!
//! A decoupled decay scales with `clr`, the rate in force, as the step does.

mod kernel;
mod reference;

use crate::engine::check::Check;
use crate::engine::frame::{Frame, common, update_on};
use crate::engine::pass::PassKind;
use crate::precision::number::Real;
use crate::{Decay, Error, Rule, Scalars, Segment, StateSlot, cuda};

/// Adagrad: gradients divided by the root of the sum of all their squares.
#[derive(Clone, Debug, PartialEq)]
pub struct Adagrad {
    /// Decay of the learning rate; at least 0.
    pub lr_decay: f64,
    /// Initial value of the sum of squares; at least 0.
    pub initial_accumulator_value: f64,
    /// Added to the root; at least 0.
    pub eps: f64,
    /// Decay of the parameters; at least 0.
    pub weight_decay: f64,
    /// Form of weight decay.
    pub decay: Decay,
    /// Maximises instead of minimising.
    pub maximize: bool,
}

impl Default for Adagrad {
    /// PyTorch's defaults.
    fn default() -> Self {
        Adagrad {
            lr_decay: 0.0,
            initial_accumulator_value: 0.0,
            eps: 1e-10,
            weight_decay: 0.0,
            decay: Decay::Coupled,
            maximize: false,
        }
    }
}

impl Adagrad {
    common!();
}

impl Rule for Adagrad {
    fn name(&self) -> &'static str {
        "adagrad"
    }

    fn state(&self) -> &'static [&'static str] {
        &["sum"]
    }

    fn check(&self) -> Result<(), Error> {
        let check = Check { rule: "adagrad" };
        check.at_least_zero("lr_decay", self.lr_decay)?;
        check.at_least_zero("initial_accumulator_value", self.initial_accumulator_value)?;
        check.at_least_zero("eps", self.eps)?;
        self.common().check(&check)
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        let Self { lr_decay, initial_accumulator_value, eps, .. } = *self;
        let initial = ("initial_accumulator_value", initial_accumulator_value);
        self.common().tell(&[("lr_decay", lr_decay), initial, ("eps", eps)], each);
    }

    /// The sum never decays.
    fn slot(&self, _: usize) -> StateSlot {
        // The first update starts from the initial value and ignores stored values.
        StateSlot::average(1.0).at_first(0.0).of_squares()
    }

    fn on_device(&self) -> Option<cuda::Hyper> {
        let own = [self.lr_decay, self.initial_accumulator_value, self.eps];
        Some(cuda::Hyper::new("adagrad", &self.common(), &own))
    }

    update_on!(or 1);
}

/// Constants of the sequence above, for one `t`.
#[derive(Clone, Copy)]
pub(crate) struct Constants<T> {
    frame: Frame<T>,
    first: bool,
    initial: T,
    eps: T,
    clr: T,
}

impl PassKind<1> for Adagrad {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, &Segment { t, .. }: &Segment) -> Constants<T> {
        let clr = scalars.lr / (1.0 + (t - 1) as f64 * self.lr_decay);
        Constants {
            frame: self.common().at(clr, scalars),
            first: t == 1,
            initial: T::from_f64(self.initial_accumulator_value),
            eps: T::from_f64(self.eps),
            clr: T::from_f64(clr),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_the_device_are_the_host_s() {
        let falling = Adagrad {
            lr_decay: 0.1,
            initial_accumulator_value: 0.2,
            weight_decay: 0.1,
            ..Adagrad::default()
        };
        let rules = [
            Adagrad::default(),
            Adagrad { decay: Decay::Decoupled, ..falling.clone() },
            Adagrad { decay: Decay::FullyDecoupled { lr_max: 0.3 }, ..falling },
        ];
        for rule in rules {
            cuda::tests::constants_equal(&rule, |scalars, segment| {
                let c = rule.constants::<f64>(scalars, segment);
                vec![c.frame.lw, c.initial, c.eps, c.clr]
            });
        }
    }
}
