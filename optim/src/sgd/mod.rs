//! Stochastic gradient descent with momentum (Polyak, 1964) or Nesterov's (Sutskever et al., 2013), with PyTorch's
//! meaning of every hyperparameter.
//!
//! One IEEE sequence per element, in the type of the parameters:
//!
//! ```text
//! g1 = g * scale              grad_scale, negated to maximise
//! g1 = fma(wd, p, g1)         with weight_decay != 0 only
//! b  = g1                     with momentum, at t = 1: the buffer starts as the gradient, without dampening
//! b  = fma(mu, b, w * g1)     with momentum, later: mu = momentum, w = 1 - dampening
//! u  = b                      fma(mu, b, g1) with nesterov; g1 without momentum
//! p  = fma(-lr, u, p)
//! ```

mod kernel;
mod reference;

use crate::check::Check;
use crate::number::Real;
use crate::pass::{Kind, pass};
use crate::{Error, Flat, Isa, Rule, Scalars, Segment};
use meshstep_tensor::Queue;

/// Stochastic gradient descent. Without momentum it keeps no state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sgd {
    /// How much of the buffer is kept each step; at least 0.
    pub momentum: f64,
    /// How much of the gradient is left out of the buffer, after the first step.
    pub dampening: f64,
    /// Looks ahead along the buffer. Needs `momentum > 0` and `dampening = 0`.
    pub nesterov: bool,
    /// Weight of the L2 penalty `weight_decay * p` added to the gradient; at least 0.
    pub weight_decay: f64,
    /// Climbs instead of descending.
    pub maximize: bool,
}

impl Rule for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn state(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum"] }
    }

    fn check(&self) -> Result<(), Error> {
        let &Sgd { momentum, dampening, nesterov, weight_decay, .. } = self;
        let check = Check { rule: "sgd" };
        check.at_least_zero("momentum", momentum)?;
        check.finite("dampening", dampening)?;
        check.at_least_zero("weight_decay", weight_decay)?;
        let allowed = !nesterov || momentum > 0.0 && dampening == 0.0;
        if allowed { Ok(()) } else { Err(Error::Nesterov { momentum, dampening }) }
    }

    fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("momentum", self.momentum),
            ("dampening", self.dampening),
            ("nesterov", self.nesterov.into()),
            ("weight_decay", self.weight_decay),
            ("maximize", self.maximize.into()),
        ]
    }

    fn retention(&self) -> f64 {
        self.momentum
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
        match self.state().len() {
            0 => pass::<0>(self, self, isa, flat, segments, scalars),
            _ => pass::<1>(self, self, isa, flat, segments, scalars),
        }
    }
}

/// The letters of the sequence above, for one `t`.
#[derive(Clone, Copy)]
pub(crate) struct Constants<T> {
    scale: T,
    decay: bool,
    wd: T,
    first: bool,
    mu: T,
    w: T,
    nesterov: bool,
    minus_lr: T,
}

impl Sgd {
    fn at<T: Real>(&self, scalars: &Scalars, t: u64) -> Constants<T> {
        let sign = if self.maximize { -1.0 } else { 1.0 };
        Constants {
            scale: T::from_f64(sign * scalars.grad_scale),
            decay: self.weight_decay != 0.0,
            wd: T::from_f64(self.weight_decay),
            first: t == 1,
            mu: T::from_f64(self.momentum),
            w: T::from_f64(1.0 - self.dampening),
            nesterov: self.nesterov,
            minus_lr: T::from_f64(-scalars.lr),
        }
    }
}

impl Kind<0> for Sgd {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, segment: &Segment) -> Constants<T> {
        self.at(scalars, segment.t)
    }
}

impl Kind<1> for Sgd {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, segment: &Segment) -> Constants<T> {
        self.at(scalars, segment.t)
    }
}
