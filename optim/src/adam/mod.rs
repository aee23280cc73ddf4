//! Adam and AdamW: Kingma and Ba, *Adam: a method for stochastic optimization* (2015), and Loshchilov and Hutter,
//! *Decoupled weight decay regularization* (2019), with PyTorch's meaning of every hyperparameter.
//!
//! One IEEE sequence per element, in the type of the parameters:
//!
//! ```text
//! g1  = g * scale                          grad_scale, negated to maximise
//! g1  = fma(wd, p, g1)                     Adam with weight_decay != 0 only
//! m   = fma(w1, g1 - m, m)                 w1 = 1 - beta1
//! v   = fma(w2 * g1, g1, b2 * v)           w2 = 1 - beta2, b2 = beta2
//! den = sqrt(v) / bc2s + eps               bc2s = sqrt(1 - beta2^t)
//! p   = p - fma(lw, p, (step * m) / den)   lw = lr * weight_decay in AdamW, 0 in Adam; step = lr / (1 - beta1^t)
//! ```
//!
//! The scalars on the right are computed in f64 and cast once: `1 - 0.999` in f32 is off by 1.3e-5. `lw` stands alone
//! because a factor `1 - lr * weight_decay` in f32 loses decays below 6e-8.

mod kernel;
mod reference;

use crate::check::Check;
use crate::number::{Real, power};
use crate::pass::{Kind, pass};
use crate::{Error, Flat, Isa, Rule, Scalars, Segment};
use meshstep_tensor::Queue;

const STATE: &[&str] = &["m", "v"];

/// Adam with decoupled weight decay: `p` shrinks by `lr * weight_decay * p`, whatever the gradient.
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
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment, in `[0, 1)`.
    pub beta1: f64,
    /// Decay of the second moment, in `[0, 1)`.
    pub beta2: f64,
    /// Added to the root of the second moment; at least 0.
    pub eps: f64,
    /// Decay of the parameters relative to the learning rate; at least 0.
    pub weight_decay: f64,
    /// Climbs instead of descending.
    pub maximize: bool,
}

/// Adam with coupled weight decay: `weight_decay * p` is added to the gradient (an L2 penalty).
#[derive(Clone, Debug, PartialEq)]
pub struct Adam {
    /// Decay of the first moment, in `[0, 1)`.
    pub beta1: f64,
    /// Decay of the second moment, in `[0, 1)`.
    pub beta2: f64,
    /// Added to the root of the second moment; at least 0.
    pub eps: f64,
    /// Weight of the penalty; at least 0.
    pub weight_decay: f64,
    /// Climbs instead of descending.
    pub maximize: bool,
}

impl Default for AdamW {
    fn default() -> Self {
        AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, maximize: false }
    }
}

impl Default for Adam {
    fn default() -> Self {
        Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, maximize: false }
    }
}

macro_rules! rule {
    ($rule:ident, $name:literal, $decay:expr) => {
        impl $rule {
            fn moments(&self) -> Moments {
                let Self { beta1, beta2, eps, weight_decay, maximize } = *self;
                Moments { beta1, beta2, eps, weight_decay, maximize, decay: $decay }
            }
        }

        impl Rule for $rule {
            fn name(&self) -> &'static str {
                $name
            }

            fn state(&self) -> &'static [&'static str] {
                STATE
            }

            fn check(&self) -> Result<(), Error> {
                self.moments().check($name)
            }

            fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
                self.moments().list()
            }

            fn retention(&self) -> f64 {
                self.beta1.max(self.beta2)
            }

            fn update_on(
                &self,
                isa: Isa,
                flat: Flat<'_, '_>,
                segments: &[Segment],
                scalars: &Scalars,
                _queue: &Queue,
            ) -> Result<(), Error> {
                self.check()?;
                pass::<2>(&self.moments(), self, isa, flat, segments, scalars)
            }
        }
    };
}
rule!(AdamW, "adamw", Decay::Decoupled);
rule!(Adam, "adam", Decay::Coupled);

/// What the two rules share.
struct Moments {
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    maximize: bool,
    decay: Decay,
}

/// Where the weight decay goes.
#[derive(Clone, Copy, PartialEq)]
enum Decay {
    /// Into the gradient.
    Coupled,
    /// Into the parameter.
    Decoupled,
}

/// The letters of the sequence above, for one `t`.
#[derive(Clone, Copy)]
struct Constants<T> {
    scale: T,
    coupled: bool,
    wd: T,
    w1: T,
    b2: T,
    w2: T,
    bc2s: T,
    bc2s_divisor: f64,
    eps: T,
    lw: T,
    step: T,
}

impl Moments {
    fn check(&self, rule: &'static str) -> Result<(), Error> {
        let check = Check { rule };
        check.range("beta1", self.beta1, (0.0..1.0).contains(&self.beta1), "0 <= beta1 < 1")?;
        check.range("beta2", self.beta2, (0.0..1.0).contains(&self.beta2), "0 <= beta2 < 1")?;
        check.at_least_zero("eps", self.eps)?;
        check.at_least_zero("weight_decay", self.weight_decay)
    }

    fn list(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("beta1", self.beta1),
            ("beta2", self.beta2),
            ("eps", self.eps),
            ("weight_decay", self.weight_decay),
            ("maximize", self.maximize.into()),
        ]
    }
}

impl Kind<2> for Moments {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, &Segment { t, .. }: &Segment) -> Constants<T> {
        let sign = if self.maximize { -1.0 } else { 1.0 };
        let decoupled = if self.decay == Decay::Decoupled { self.weight_decay } else { 0.0 };
        let bias1 = 1.0 - power(self.beta1, t);
        let bias2 = 1.0 - power(self.beta2, t);
        let bc2s = T::from_f64(bias2.sqrt());
        Constants {
            scale: T::from_f64(sign * scalars.grad_scale),
            coupled: self.decay == Decay::Coupled && self.weight_decay != 0.0,
            wd: T::from_f64(self.weight_decay),
            w1: T::from_f64(1.0 - self.beta1),
            b2: T::from_f64(self.beta2),
            w2: T::from_f64(1.0 - self.beta2),
            bc2s,
            bc2s_divisor: T::divisor(bc2s),
            eps: T::from_f64(self.eps),
            lw: T::from_f64(scalars.lr * decoupled),
            step: T::from_f64(scalars.lr / bias1),
        }
    }
}
