//! ADOPT (Taniguchi et al., *ADOPT: modified Adam can converge with any beta2 with the optimal rate*, 2024, and the
//! authors' program) and its quasi-hyperbolic form (the mixing of Ma and Yarats, 2019; several moments as in MT-DAO).
//!
//! One IEEE sequence per element, in the type of the parameters:
//!
//! ```text
//! g1  = g * scale                       grad_scale, negated to maximise
//! g1  = fma(wd, p, g1)                  coupled decay only
//! at t = 1: v = g1 * g1, and nothing else: no step, no decay of the parameter
//! den = max(sqrt(v), eps)               the v of the step before
//! h   = g1 / den, within -bound..bound  bound = (t - 1)^(1/4): 1 at t = 2
//! m_j = fma(w_j, h - m_j, m_j)          w_j = 1 - beta1 of moment j
//! u   = q0 * h, + q_j * m_j each        fma(q_j, m_j, u); q_j = weight_j, q0 = 1 - their sum. In Adopt u = m
//! v   = fma(w2 * g1, g1, b2 * v)        w2 = 1 - beta2, b2 = beta2
//! p   = p - fma(lw, p, lr * u)          lw: the decay's share, 0 if coupled
//! ```
//!
//! The moments need no bias correction: they are meant to be 0 before the first `h`. With `eps = 0`, a gradient that is 0 from the start
//! yields NaN, as in the authors' program.

mod kernel;
mod reference;

use crate::engine::check::Check;
use crate::engine::frame::{Common, Frame, common, update_on};
use crate::engine::moments::{Mix, Moments};
use crate::engine::pass::PassKind;
use crate::precision::number::Real;
use crate::{Decay, Error, Rule, Scalars, Segment, StateSlot, cuda};

/// ADOPT: gradients divided by the root of the *previous* second moment, clamped, then averaged. The rule converges with any `beta2`.
#[derive(Clone, Debug, PartialEq)]
pub struct Adopt {
    /// Decay of the average, in `[0, 1)`.
    pub beta1: f64,
    /// Decay of the second moment, in `[0, 1)`.
    pub beta2: f64,
    /// Minimum divisor of a gradient; at least 0.
    pub eps: f64,
    /// Decay of the parameters; at least 0.
    pub weight_decay: f64,
    /// Form of weight decay.
    pub decay: Decay,
    /// Maximises instead of minimising.
    pub maximize: bool,
}

/// [`Adopt`] with steps that mix the normalised gradient with one or several slow averages of it.
#[derive(Clone, Debug, PartialEq)]
pub struct QhAdopt {
    /// Averages: decays, and weights in a step.
    pub moments: Moments,
    /// Decay of the second moment, in `[0, 1)`.
    pub beta2: f64,
    /// Minimum divisor of a gradient; at least 0.
    pub eps: f64,
    /// Decay of the parameters; at least 0.
    pub weight_decay: f64,
    /// Form of weight decay.
    pub decay: Decay,
    /// Maximises instead of minimising.
    pub maximize: bool,
}

/// Families of CUDA kernels, by number of moments.
const FAMILIES: [&str; Moments::MAX] = ["adopt_1", "adopt_2", "adopt_3", "adopt_4"];

impl Default for Adopt {
    /// The authors' defaults, with decoupled decay if `weight_decay` is set.
    fn default() -> Self {
        let (weight_decay, decay) = (0.0, Decay::Decoupled);
        Adopt { beta1: 0.9, beta2: 0.9999, eps: 1e-6, weight_decay, decay, maximize: false }
    }
}

impl Default for QhAdopt {
    /// ADOPT's defaults, with one moment of decay 0.999 and weight 0.9, and decoupled decay if `weight_decay` is set.
    fn default() -> Self {
        let Adopt { beta2, eps, weight_decay, decay, maximize, .. } = Adopt::default();
        QhAdopt { moments: Moments::one(0.999, 0.9), beta2, eps, weight_decay, decay, maximize }
    }
}

impl Adopt {
    common!();
}

impl QhAdopt {
    common!();
}

impl Rule for Adopt {
    fn name(&self) -> &'static str {
        "adopt"
    }

    fn state(&self) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn check(&self) -> Result<(), Error> {
        let check = Check { rule: "adopt" };
        check.beta("beta1", self.beta1)?;
        check.beta("beta2", self.beta2)?;
        check.at_least_zero("eps", self.eps)?;
        self.common().check(&check)
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        self.common().tell(&[("beta1", self.beta1), ("beta2", self.beta2), ("eps", self.eps)], each);
    }

    fn slot(&self, slot: usize) -> StateSlot {
        // The first update sets v and nothing else.
        match slot {
            0 => StateSlot::average(self.beta1).at_first(1.0),
            _ => StateSlot::average(self.beta2).at_first(0.0).of_squares(),
        }
    }

    fn on_device(&self) -> Option<cuda::Hyper> {
        let moments = Moments::one(self.beta1, 1.0);
        Some(moments.on_device(FAMILIES, &self.common(), [self.beta2, self.eps]))
    }

    update_on!(or 2);
}

impl Rule for QhAdopt {
    fn name(&self) -> &'static str {
        "qhadopt"
    }

    fn state(&self) -> &'static [&'static str] {
        self.moments.state()
    }

    fn check(&self) -> Result<(), Error> {
        let check = Check { rule: "qhadopt" };
        self.moments.check(&check)?;
        check.beta("beta2", self.beta2)?;
        check.at_least_zero("eps", self.eps)?;
        self.common().check(&check)
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        self.moments.tell(each);
        self.common().tell(&[("beta2", self.beta2), ("eps", self.eps)], each);
    }

    fn slot(&self, slot: usize) -> StateSlot {
        match self.moments.pairs().get(slot) {
            Some((beta, _)) => StateSlot::average(*beta).at_first(1.0),
            None => StateSlot::average(self.beta2).at_first(0.0).of_squares(),
        }
    }

    fn on_device(&self) -> Option<cuda::Hyper> {
        Some(self.moments.on_device(FAMILIES, &self.common(), [self.beta2, self.eps]))
    }

    update_on!(2 3 4 or 5);
}

/// Constants of the sequence above, for one `t`.
#[derive(Clone, Copy)]
pub(crate) struct Constants<T> {
    frame: Frame<T>,
    first: bool,
    mix: Mix<T>,
    b2: T,
    w2: T,
    eps: T,
    bound: T,
    minus_bound: T,
    lr: T,
}

impl<T: Real> Constants<T> {
    fn at(common: &Common, moments: Moments, [beta2, eps]: [f64; 2], scalars: &Scalars, t: u64) -> Self {
        // Two square roots: each is rounded correctly on every platform, so no power function is needed.
        let bound = ((t - 1) as f64).sqrt().sqrt();
        Constants {
            frame: common.at(scalars.lr, scalars),
            first: t == 1,
            mix: moments.mix(|_| 1.0),
            b2: T::from_f64(beta2),
            w2: T::from_f64(1.0 - beta2),
            eps: T::from_f64(eps),
            bound: T::from_f64(bound),
            minus_bound: T::from_f64(-bound),
            lr: T::from_f64(scalars.lr),
        }
    }
}

impl PassKind<2> for Adopt {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, segment: &Segment) -> Constants<T> {
        let moments = Moments::one(self.beta1, 1.0);
        Constants::at(&self.common(), moments, [self.beta2, self.eps], scalars, segment.t)
    }
}

impl<const S: usize> PassKind<S> for QhAdopt {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, segment: &Segment) -> Constants<T> {
        Constants::at(&self.common(), self.moments, [self.beta2, self.eps], scalars, segment.t)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn constants(c: &Constants<f64>) -> Vec<f64> {
        let own = [c.b2, c.w2, c.eps, c.bound, c.lr];
        [&[c.frame.lw][..], &c.mix.w, &c.mix.q, &[c.mix.q0], &own].concat()
    }

    #[test]
    fn constants_of_the_device_are_the_host_s() {
        for decay in [Decay::Coupled, Decay::Decoupled, Decay::FullyDecoupled { lr_max: 0.3 }] {
            let rule = Adopt { weight_decay: 0.1, decay, ..Adopt::default() };
            cuda::tests::constants_equal(&rule, |scalars, segment| {
                constants(&rule.constants::<f64>(scalars, segment))
            });
            for n in 1..=4 {
                let moments =
                    Moments::new(&[(0.9, 0.3), (0.99, 0.2), (0.999, 0.4), (0.0, 0.1)][..n]).unwrap();
                let rule = QhAdopt { moments, weight_decay: 0.1, decay, ..QhAdopt::default() };
                cuda::tests::constants_equal(&rule, |scalars, segment| {
                    constants(&PassKind::<5>::constants::<f64>(&rule, scalars, segment))
                });
            }
        }
    }
}
