//! Quasi-hyperbolic AdamW (Ma and Yarats, *Quasi-hyperbolic momentum and Adam for deep learning*, 2019, with their
//! nu2 = 1 and decoupled decay), with one or several moments (as in MT-DAO, multi-timescale distributed adaptive optimizers).
//!
//! One IEEE sequence per element, in the type of the parameters:
//!
//! ```text
//! g1  = g * scale                          grad_scale, negated to maximise
//! g1  = fma(wd, p, g1)                     coupled decay only
//! m_j = fma(w_j, g1 - m_j, m_j)            w_j = 1 - beta1 of moment j
//! u   = q0 * g1, + q_j * m_j each          fma(q_j, m_j, u); q_j = weight_j / (1 - beta1_j^t), q0 = 1 - sum of weights
//! v   = fma(w2 * g1, g1, b2 * v)           w2 = 1 - beta2, b2 = beta2
//! den = sqrt(v) / bc2s + eps               bc2s = sqrt(1 - beta2^t)
//! p   = p - fma(lw, p, (lr * u) / den)     lw: the decay's share, 0 if coupled
//! ```

mod kernel;
mod reference;

use crate::engine::check::Check;
use crate::engine::frame::{Frame, common, update_on};
use crate::engine::moments::{Mix, Moments};
use crate::engine::pass::PassKind;
use crate::precision::number::{Real, power};
use crate::{Decay, Error, Rule, Scalars, Segment, StateSlot, cuda};

/// [`AdamW`](crate::AdamW) with steps that mix the gradient with one or several slow averages of it.
#[derive(Clone, Debug, PartialEq)]
pub struct QhAdamW {
    /// Averages: decays, and weights in a step.
    pub moments: Moments,
    /// Decay of the second moment, in `[0, 1)`.
    pub beta2: f64,
    /// Added to the root of the second moment; at least 0.
    pub eps: f64,
    /// Decay of the parameters; at least 0.
    pub weight_decay: f64,
    /// Form of weight decay.
    pub decay: Decay,
    /// Maximises instead of minimising.
    pub maximize: bool,
}

impl Default for QhAdamW {
    /// One moment as recommended by the paper, 0.995 with nu = 0.7; otherwise AdamW's defaults.
    fn default() -> Self {
        QhAdamW {
            moments: Moments::one(0.995, 0.7),
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            decay: Decay::Decoupled,
            maximize: false,
        }
    }
}

impl QhAdamW {
    common!();
}

impl Rule for QhAdamW {
    fn name(&self) -> &'static str {
        "qhadamw"
    }

    fn state(&self) -> &'static [&'static str] {
        self.moments.state()
    }

    fn check(&self) -> Result<(), Error> {
        let check = Check { rule: "qhadamw" };
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
            Some((beta, _)) => StateSlot::average(*beta),
            None => StateSlot::average(self.beta2).of_squares(),
        }
    }

    fn on_device(&self) -> Option<cuda::Hyper> {
        let families = ["qhadamw_1", "qhadamw_2", "qhadamw_3", "qhadamw_4"];
        Some(self.moments.on_device(families, &self.common(), [self.beta2, self.eps]))
    }

    update_on!(2 3 4 or 5);
}

/// Constants of the sequence above, for one `t`.
#[derive(Clone, Copy)]
pub(crate) struct Constants<T: Real> {
    frame: Frame<T>,
    mix: Mix<T>,
    b2: T,
    w2: T,
    bc2s: T,
    bc2s_divisor: T::Divisor,
    eps: T,
    lr: T,
}

impl<const S: usize> PassKind<S> for QhAdamW {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, &Segment { t, .. }: &Segment) -> Constants<T> {
        let bc2s = T::from_f64((1.0 - power(self.beta2, t)).sqrt());
        Constants {
            frame: self.common().at(scalars.lr, scalars),
            mix: self.moments.mix(|beta| 1.0 - power(beta, t)),
            b2: T::from_f64(self.beta2),
            w2: T::from_f64(1.0 - self.beta2),
            bc2s,
            bc2s_divisor: T::divisor(bc2s),
            eps: T::from_f64(self.eps),
            lr: T::from_f64(scalars.lr),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_the_device_are_the_host_s() {
        let pairs = [(0.9, 0.3), (0.99, 0.2), (0.999, 0.4), (0.0, 0.1)];
        let moments = |n: usize| Moments::new(&pairs[..n]).unwrap();
        let rules = [
            QhAdamW::default(),
            QhAdamW {
                moments: moments(2),
                decay: Decay::FullyDecoupled { lr_max: 0.3 },
                ..QhAdamW::default()
            },
            QhAdamW { moments: moments(3), decay: Decay::Coupled, ..QhAdamW::default() },
            // Weights that add up to 1.
            QhAdamW { moments: moments(4), beta2: 0.0, ..QhAdamW::default() },
        ];
        for rule in rules {
            cuda::tests::constants_equal(&rule, |scalars, segment| {
                let c = PassKind::<5>::constants::<f64>(&rule, scalars, segment);
                let own = [c.b2, c.w2, c.bc2s, c.eps, c.lr];
                [&[c.frame.lw][..], &c.mix.w, &c.mix.q, &[c.mix.q0], &own].concat()
            });
        }
    }
}
