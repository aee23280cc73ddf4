//! RMSprop (Tieleman and Hinton, *Lecture 6.5*, 2012; centred: Graves, *Generating sequences with recurrent neural
//! networks*, 2013), with PyTorch's meaning of every hyperparameter.
//!
//! One IEEE sequence per element, in the type of the parameters:
//!
//! ```text
//! g1  = g * scale                   grad_scale, negated to maximise
//! g1  = fma(wd, p, g1)              coupled decay only
//! sa  = fma(w * g1, g1, a * sa)     square_avg: a = alpha, w = 1 - alpha
//! ga  = fma(w, g1 - ga, ga)         grad_avg, with centered only
//! var = max(0, fma(-ga, ga, sa))    sa without centered
//! u   = g1 / (sqrt(var) + eps)
//! u   = b = fma(mu, b, u)           with momentum: mu
//! p   = p - fma(lw, p, lr * u)      lw: the decay's share, 0 if coupled
//! ```
//!
//! Differences to PyTorch: under steady gradients the variance is a rounding error of either sign. PyTorch takes the root of a negative
//! one, and the parameter is NaN from then on; here it counts as 0. And `alpha >= 1`, with which PyTorch's average of squares never moves
//! or turns negative, is refused.

mod kernel;
mod reference;

use crate::engine::check::Check;
use crate::engine::frame::{Frame, common, update_on};
use crate::engine::pass::PassKind;
use crate::precision::number::Real;
use crate::{Decay, Error, Rule, Scalars, Segment, StateSlot, cuda};

/// RMSprop: gradients divided by the root of the average of their squares, or by their standard deviation.
///
/// ```
/// use meshstep_optim::{RmsProp, Rule};
///
/// let rule = RmsProp { momentum: 0.9, centered: true, ..RmsProp::default() };
/// assert_eq!(rule.state(), ["square_avg", "grad_avg", "momentum"]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct RmsProp {
    /// Decay of the average of squares, in `[0, 1)`.
    pub alpha: f64,
    /// Added to the root; at least 0.
    pub eps: f64,
    /// Fraction of the momentum buffer kept in each step; at least 0.
    pub momentum: f64,
    /// Divides by the standard deviation: also keeps the gradient's average and subtracts its square.
    pub centered: bool,
    /// Decay of the parameters; at least 0.
    pub weight_decay: f64,
    /// Form of weight decay.
    pub decay: Decay,
    /// Maximises instead of minimising.
    pub maximize: bool,
}

impl Default for RmsProp {
    /// PyTorch's defaults.
    fn default() -> Self {
        RmsProp {
            alpha: 0.99,
            eps: 1e-8,
            momentum: 0.0,
            centered: false,
            weight_decay: 0.0,
            decay: Decay::Coupled,
            maximize: false,
        }
    }
}

impl RmsProp {
    common!();
}

impl Rule for RmsProp {
    fn name(&self) -> &'static str {
        "rmsprop"
    }

    fn state(&self) -> &'static [&'static str] {
        match (self.centered, self.momentum != 0.0) {
            (false, false) => &["square_avg"],
            (true, false) => &["square_avg", "grad_avg"],
            (false, true) => &["square_avg", "momentum"],
            (true, true) => &["square_avg", "grad_avg", "momentum"],
        }
    }

    fn check(&self) -> Result<(), Error> {
        let check = Check { rule: "rmsprop" };
        check.beta("alpha", self.alpha)?;
        check.at_least_zero("eps", self.eps)?;
        check.at_least_zero("momentum", self.momentum)?;
        self.common().check(&check)
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        let Self { alpha, eps, momentum, centered, .. } = *self;
        let own = [("alpha", alpha), ("eps", eps), ("momentum", momentum), ("centered", centered.into())];
        self.common().tell(&own, each);
    }

    fn slot(&self, slot: usize) -> StateSlot {
        match self.state()[slot] {
            "square_avg" => StateSlot::average(self.alpha).of_squares(),
            "grad_avg" => StateSlot::average(self.alpha),
            _ => StateSlot::average(self.momentum),
        }
    }

    fn on_device(&self) -> Option<cuda::Hyper> {
        let family = match (self.centered, self.momentum != 0.0) {
            (false, false) => "rmsprop",
            (true, false) => "rmsprop_centered",
            (false, true) => "rmsprop_momentum",
            (true, true) => "rmsprop_centered_momentum",
        };
        Some(cuda::Hyper::new(family, &self.common(), &[self.alpha, self.eps, self.momentum]))
    }

    update_on!(1 2 or 3);
}

/// Constants of the sequence above, for one step.
#[derive(Clone, Copy)]
pub(crate) struct Constants<T> {
    frame: Frame<T>,
    centered: bool,
    a: T,
    w: T,
    eps: T,
    mu: T,
    lr: T,
}

impl<const S: usize> PassKind<S> for RmsProp {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, _: &Segment) -> Constants<T> {
        Constants {
            frame: self.common().at(scalars.lr, scalars),
            centered: self.centered,
            a: T::from_f64(self.alpha),
            w: T::from_f64(1.0 - self.alpha),
            eps: T::from_f64(self.eps),
            mu: T::from_f64(self.momentum),
            lr: T::from_f64(scalars.lr),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_the_device_are_the_host_s() {
        let momentum = RmsProp { alpha: 0.9, momentum: 0.7, weight_decay: 0.1, ..RmsProp::default() };
        let rules = [
            RmsProp::default(),
            RmsProp { decay: Decay::Decoupled, ..momentum.clone() },
            RmsProp { centered: true, decay: Decay::FullyDecoupled { lr_max: 0.3 }, ..momentum },
        ];
        for rule in rules {
            cuda::tests::constants_equal(&rule, |scalars, segment| {
                let c = PassKind::<3>::constants::<f64>(&rule, scalars, segment);
                vec![c.frame.lw, c.a, c.w, c.eps, c.mu, c.lr]
            });
        }
    }
}
