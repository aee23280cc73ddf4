//! Stochastic gradient descent with momentum (Polyak, 1964) or Nesterov's (Sutskever et al., 2013), in three common forms: PyTorch's, an
//! average of gradients, and the one with the learning rate inside the buffer.
//!
//! One IEEE sequence per element, in the type of the parameters; without momentum `u = g1`:
//!
//! ```text
//! g1 = g * scale              grad_scale, negated to maximise
//! g1 = fma(wd, p, g1)         coupled decay only
//! b  = fma(w, g1 - b, b)      Average: w = 1 - momentum
//! b  = w0 * g1                the other forms, at t = 1: w0 = lr with LrInside, else 1 (no dampening)
//! b  = fma(mu, b, w * g1)     the other forms, later: mu = momentum, w = lr with LrInside, else 1 - dampening
//! u  = b                      fma(mu, b, g1) with nesterov
//! p  = p - fma(lw, p, r * u)  lw: the decay's share, 0 if coupled; r = lr, or lr / (1 - momentum^t), or 1 with LrInside
//! ```

mod kernel;
mod reference;

use crate::engine::check::Check;
use crate::engine::frame::{Frame, common, update_on};
use crate::engine::pass::PassKind;
use crate::precision::number::{Real, power};
use crate::{Decay, Error, Rule, Scalars, Segment, StateSlot, cuda};

/// Stochastic gradient descent. Without momentum it has no state.
///
/// ```
/// use meshstep_optim::{Momentum, Rule, Sgd};
///
/// let torch = Sgd { momentum: 0.9, nesterov: true, ..Sgd::default() };
/// let average = Sgd { momentum: 0.9, form: Momentum::Average { debias: true }, ..Sgd::default() };
/// assert_eq!(torch.check(), Ok(()));
/// assert_eq!(average.state(), ["momentum"]);
/// // Only PyTorch's form supports Nesterov momentum and dampening.
/// assert!(Sgd { nesterov: true, ..average }.check().is_err());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Sgd {
    /// Fraction of the buffer kept in each step; at least 0, and below 1 in an average.
    pub momentum: f64,
    /// Form of the momentum buffer.
    pub form: Momentum,
    /// Fraction of the gradient left out of PyTorch's buffer, after the first step.
    pub dampening: f64,
    /// Uses Nesterov momentum, with PyTorch's buffer only. Requires `momentum > 0` and `dampening = 0`.
    pub nesterov: bool,
    /// Decay of the parameters; at least 0.
    pub weight_decay: f64,
    /// Form of weight decay.
    pub decay: Decay,
    /// Maximises instead of minimising.
    pub maximize: bool,
}

/// Form of the momentum buffer `b`, and of the step that uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Momentum {
    /// Sum: `b = momentum * b + (1 - dampening) * g`, starting with the first gradient, undampened; `p -= lr * b`.
    #[default]
    PyTorch,
    /// Average: `b = momentum * b + (1 - momentum) * g`, starting at 0; `p -= lr * b`.
    Average {
        /// Divides by `1 - momentum^t`, so that the first steps are not too short.
        debias: bool,
    },
    /// Sum of steps: `b = momentum * b + lr * g`; `p -= b`. A new learning rate does not rescale the buffer (Sutskever et al.; Caffe,
    /// TensorFlow's Keras).
    LrInside,
}

impl Default for Sgd {
    /// PyTorch's defaults: no momentum, no decay (coupled if it is set).
    fn default() -> Self {
        Sgd {
            momentum: 0.0,
            form: Momentum::PyTorch,
            dampening: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            decay: Decay::Coupled,
            maximize: false,
        }
    }
}

impl Rule for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn state(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum"] }
    }

    fn check(&self) -> Result<(), Error> {
        let &Sgd { momentum, form, dampening, nesterov, .. } = self;
        let check = Check { rule: "sgd" };
        match form {
            Momentum::Average { .. } => check.beta("momentum", momentum)?,
            _ => check.at_least_zero("momentum", momentum)?,
        }
        check.finite("dampening", dampening)?;
        self.common().check(&check)?;
        if form != Momentum::PyTorch {
            check.range(
                "dampening",
                dampening,
                dampening == 0.0,
                "0 unless the form is Momentum::PyTorch",
            )?;
            check.range("nesterov", 1.0, !nesterov, "false unless the form is Momentum::PyTorch")?;
        }
        let allowed = !nesterov || momentum > 0.0 && dampening == 0.0;
        if allowed { Ok(()) } else { Err(Error::Nesterov { momentum, dampening }) }
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        let (form, debias) = match self.form {
            Momentum::PyTorch => (0.0, false),
            Momentum::Average { debias } => (1.0, debias),
            Momentum::LrInside => (2.0, false),
        };
        let own = [
            ("momentum", self.momentum),
            ("form", form),
            ("debias", debias.into()),
            ("dampening", self.dampening),
            ("nesterov", self.nesterov.into()),
        ];
        self.common().tell(&own, each);
    }

    fn slot(&self, _: usize) -> StateSlot {
        let momentum = StateSlot::average(self.momentum);
        match self.form {
            Momentum::Average { .. } => momentum,
            // The first update replaces the buffer.
            Momentum::PyTorch | Momentum::LrInside => momentum.at_first(0.0),
        }
    }

    fn on_device(&self) -> Option<cuda::Hyper> {
        if self.momentum == 0.0 {
            return Some(cuda::Hyper::new("sgd", &self.common(), &[]));
        }
        let (average, debias) = match self.form {
            Momentum::Average { debias } => (true, debias),
            _ => (false, false),
        };
        let hyper = cuda::Hyper::new("sgd_momentum", &self.common(), &[self.momentum, self.dampening]);
        Some(hyper.with(&[average, self.nesterov, debias, self.form == Momentum::LrInside]))
    }

    update_on!(0 or 1);
}

/// Constants of the sequence above, for one `t`.
#[derive(Clone, Copy)]
pub(crate) struct Constants<T> {
    frame: Frame<T>,
    average: bool,
    first: bool,
    mu: T,
    w: T,
    nesterov: bool,
    r: T,
}

impl Sgd {
    common!();
}

impl<const S: usize> PassKind<S> for Sgd {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, &Segment { t, .. }: &Segment) -> Constants<T> {
        let (lr, first) = (scalars.lr, t == 1);
        let (w, r) = match self.form {
            Momentum::PyTorch if first => (1.0, lr),
            Momentum::PyTorch => (1.0 - self.dampening, lr),
            Momentum::Average { debias: false } => (1.0 - self.momentum, lr),
            Momentum::Average { debias: true } => (1.0 - self.momentum, lr / (1.0 - power(self.momentum, t))),
            Momentum::LrInside => (lr, 1.0),
        };
        Constants {
            frame: self.common().at(lr, scalars),
            average: matches!(self.form, Momentum::Average { .. }),
            first,
            mu: T::from_f64(self.momentum),
            w: T::from_f64(w),
            nesterov: self.nesterov,
            // Without momentum all forms are the same.
            r: T::from_f64(if S == 0 { lr } else { r }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_the_device_are_the_host_s() {
        let momentum = Sgd { momentum: 0.9, weight_decay: 0.1, decay: Decay::Decoupled, ..Sgd::default() };
        let form = |form| Sgd { form, ..momentum.clone() };
        let rules = [
            Sgd::default(),
            Sgd { dampening: 0.3, ..momentum.clone() },
            Sgd { decay: Decay::FullyDecoupled { lr_max: 0.7 }, ..momentum.clone() },
            form(Momentum::Average { debias: false }),
            form(Momentum::Average { debias: true }),
            form(Momentum::LrInside),
        ];
        for rule in rules {
            cuda::tests::constants_equal(&rule, |scalars, segment| match rule.momentum == 0.0 {
                true => {
                    let c = PassKind::<0>::constants::<f64>(&rule, scalars, segment);
                    vec![c.frame.lw, c.r]
                }
                false => {
                    let c = PassKind::<1>::constants::<f64>(&rule, scalars, segment);
                    vec![c.frame.lw, c.r, c.mu, c.w]
                }
            });
        }
    }
}
