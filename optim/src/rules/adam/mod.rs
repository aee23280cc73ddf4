//! Adam and AdamW: Kingma and Ba, *Adam: a method for stochastic optimization* (2015), and Loshchilov and Hutter,
//! *Decoupled weight decay regularization* (2019); AMSGrad: Reddi et al., *On the convergence of Adam and beyond* (2018),
//! with PyTorch's meaning of every hyperparameter.
//!
//! One IEEE sequence per element, in the type of the parameters:
//!
//! ```text
//! g1   = g * scale                          grad_scale, negated to maximise
//! g1   = fma(wd, p, g1)                     coupled decay only
//! m    = fma(w1, g1 - m, m)                 w1 = 1 - beta1
//! v    = fma(w2 * g1, g1, b2 * v)           w2 = 1 - beta2, b2 = beta2
//! vmax = max(vmax, v)                       with amsgrad: stands for v below
//! den  = sqrt(v) / bc2s + eps               bc2s = sqrt(1 - beta2^t)
//! p    = p - fma(lw, p, (step * m) / den)   lw: the decay's share, 0 if coupled; step = lr / (1 - beta1^t)
//! ```
//!
//! The scalars on the right are computed in f64 and cast once: `1 - 0.999` in f32 is off by 1.3e-5. As in PyTorch, but unlike the paper,
//! AMSGrad takes the maximum before the bias correction.

mod kernel;
mod reference;

use crate::engine::check::Check;
use crate::engine::frame::{Frame, common, update_on};
use crate::engine::pass::PassKind;
use crate::precision::number::{Real, power};
use crate::{Decay, Error, Rule, Scalars, Segment, StateSlot, cuda};

macro_rules! rule {
    ($(#[$doc:meta])* $rule:ident, $name:literal, $weight_decay:literal, $decay:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $rule {
            /// Decay of the first moment, in `[0, 1)`.
            pub beta1: f64,
            /// Decay of the second moment, in `[0, 1)`.
            pub beta2: f64,
            /// Added to the root of the second moment; at least 0.
            pub eps: f64,
            /// Divides by the root of the largest second moment so far; one more state vector, `vmax`.
            pub amsgrad: bool,
            /// Decay of the parameters; at least 0.
            pub weight_decay: f64,
            /// Form of weight decay.
            pub decay: Decay,
            /// Maximises instead of minimising.
            pub maximize: bool,
        }

        impl Default for $rule {
            fn default() -> Self {
                $rule {
                    beta1: 0.9,
                    beta2: 0.999,
                    eps: 1e-8,
                    amsgrad: false,
                    weight_decay: $weight_decay,
                    decay: $decay,
                    maximize: false,
                }
            }
        }

        impl $rule {
            common!();
        }

        impl Rule for $rule {
            fn name(&self) -> &'static str {
                $name
            }

            fn state(&self) -> &'static [&'static str] {
                if self.amsgrad { &["m", "v", "vmax"] } else { &["m", "v"] }
            }

            fn check(&self) -> Result<(), Error> {
                let check = Check { rule: $name };
                check.beta("beta1", self.beta1)?;
                check.beta("beta2", self.beta2)?;
                check.at_least_zero("eps", self.eps)?;
                self.common().check(&check)
            }

            fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
                let Self { beta1, beta2, eps, amsgrad, .. } = *self;
                self.common().tell(&[("beta1", beta1), ("beta2", beta2), ("eps", eps), ("amsgrad", amsgrad.into())], each);
            }

            fn slot(&self, slot: usize) -> StateSlot {
                match slot {
                    0 => StateSlot::average(self.beta1),
                    1 => StateSlot::average(self.beta2).of_squares(),
                    _ => StateSlot::maximum().of_squares(),
                }
            }

            fn on_device(&self) -> Option<cuda::Hyper> {
                let family = if self.amsgrad { "adam_amsgrad" } else { "adam" };
                Some(cuda::Hyper::new(family, &self.common(), &[self.beta1, self.beta2, self.eps]))
            }

            update_on!(2 or 3);
        }

        impl<const S: usize> PassKind<S> for $rule {
            type Step<T: Real> = Constants<T>;

            fn constants<T: Real>(&self, scalars: &Scalars, &Segment { t, .. }: &Segment) -> Constants<T> {
                let frame = self.common().at(scalars.lr, scalars);
                Constants::at([self.beta1, self.beta2, self.eps], scalars.lr, t, frame)
            }
        }
    };
}

rule!(
    /// Adam with decoupled weight decay: `p` shrinks by `lr * weight_decay * p`, independent of the gradient. The same rule as [`Adam`],
    /// with other defaults.
    ///
    /// ```
    /// use meshstep_optim::{AdamW, Flat, Rule, Scalars, Segment};
    /// use meshstep_tensor::Queue;
    ///
    /// let rule = AdamW { weight_decay: 0.1, ..AdamW::default() };
    /// let (mut p, mut g, mut m, mut v) = ([1f32; 4], [0.5f32; 4], [0f32; 4], [0f32; 4]);
    /// let mut state = [(&mut m[..]).into(), (&mut v[..]).into()];
    /// let flat = Flat { params: (&mut p[..]).into(), grads: (&mut g[..]).into(), state: &mut state, copy: None, remainder: None };
    /// let scalars = Scalars { lr: 1e-3, grad_scale: 1.0, zero_grads: true, ..Scalars::default() };
    /// rule.update(flat, &[Segment::new(0..4, 1)], &scalars, &Queue::cpu())?;
    /// assert!((p[0] - (1.0 - 1e-3 - 1e-4)).abs() < 1e-6 && g == [0.0; 4]);
    /// # Ok::<(), meshstep_optim::Error>(())
    /// ```
    AdamW, "adamw", 0.01, Decay::Decoupled
);
rule!(
    /// Adam with coupled weight decay: `weight_decay * p` is added to the gradient (an L2 penalty).
    Adam, "adam", 0.0, Decay::Coupled
);

/// Constants of the sequence above, for one `t`.
#[derive(Clone, Copy)]
pub(crate) struct Constants<T: Real> {
    frame: Frame<T>,
    w1: T,
    b2: T,
    w2: T,
    bc2s: T,
    bc2s_divisor: T::Divisor,
    eps: T,
    step: T,
}

impl<T: Real> Constants<T> {
    fn at([beta1, beta2, eps]: [f64; 3], lr: f64, t: u64, frame: Frame<T>) -> Self {
        let bc2s = T::from_f64((1.0 - power(beta2, t)).sqrt());
        Constants {
            frame,
            w1: T::from_f64(1.0 - beta1),
            b2: T::from_f64(beta2),
            w2: T::from_f64(1.0 - beta2),
            bc2s,
            bc2s_divisor: T::divisor(bc2s),
            eps: T::from_f64(eps),
            step: T::from_f64(lr / (1.0 - power(beta1, t))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_the_device_are_the_host_s() {
        let fully = Decay::FullyDecoupled { lr_max: 0.03 };
        let rules = [
            AdamW::default(),
            AdamW { amsgrad: true, decay: fully, ..AdamW::default() },
            AdamW { beta1: 0.0, beta2: 0.95, eps: 0.0, decay: Decay::Coupled, ..AdamW::default() },
        ];
        for rule in rules {
            cuda::tests::constants_equal(&rule, |scalars, segment| {
                let c = PassKind::<2>::constants::<f64>(&rule, scalars, segment);
                vec![c.frame.lw, c.w1, c.b2, c.w2, c.bc2s, c.eps, c.step]
            });
        }
    }
}
