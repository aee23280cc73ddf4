//! Begin and end of every elementwise rule: scaling of the gradient, and update of the parameter.
//!
//! ```text
//! g1 = g * scale              grad_scale, negated to maximise
//! g1 = fma(wd, p, g1)         with coupled decay and weight_decay != 0 only
//! ...                         the rule's own sequence
//! p  = p - fma(lw, p, step)   lw = lr * weight_decay if decoupled, weight_decay * lr / lr_max if fully so, else 0
//! ```
//!
//! `lw` is not combined into a factor `1 - lr * weight_decay`, which in f32 loses decays below 6e-8.

use crate::engine::check::Check;
use crate::precision::number::Real;
use crate::{Decay, Error, Scalars};

/// Hyperparameters that every elementwise rule has.
pub(crate) struct Common {
    pub(crate) weight_decay: f64,
    pub(crate) decay: Decay,
    pub(crate) maximize: bool,
}

/// Constants of the sequence above, for one step.
#[derive(Clone, Copy)]
pub(crate) struct Frame<T> {
    pub(crate) scale: T,
    pub(crate) coupled: bool,
    pub(crate) wd: T,
    pub(crate) lw: T,
}

impl Common {
    pub(crate) fn check(&self, check: &Check) -> Result<(), Error> {
        self.decay.check(check, self.weight_decay)
    }

    /// Calls `each` with the hyperparameters `own`, then with the common ones.
    pub(crate) fn tell(&self, own: &[(&'static str, f64)], each: &mut dyn FnMut(&'static str, f64)) {
        let [kind, lr_max] = self.decay.list();
        let these = [("weight_decay", self.weight_decay), kind, lr_max, ("maximize", self.maximize.into())];
        own.iter().chain(&these).for_each(|&(name, value)| each(name, value));
    }

    /// Returns the learning rate, or the fraction of a parameter that decays if that is larger.
    pub(crate) fn reach(&self, lr: f64) -> f64 {
        lr.max(self.decay.share(self.weight_decay, lr))
    }

    /// Returns the constants of a step at learning rate `lr`, which may differ from that of `scalars`.
    pub(crate) fn at<T: Real>(&self, lr: f64, scalars: &Scalars) -> Frame<T> {
        let sign = if self.maximize { -1.0 } else { 1.0 };
        Frame {
            scale: T::from_f64(sign * scalars.grad_scale),
            coupled: self.decay == Decay::Coupled && self.weight_decay != 0.0,
            wd: T::from_f64(self.weight_decay),
            lw: T::from_f64(self.decay.share(self.weight_decay, lr)),
        }
    }
}

impl<T: Real> Frame<T> {
    /// Returns the scaled gradient with its penalty.
    #[inline(always)]
    pub(crate) fn gradient(&self, p: T, g: T) -> T {
        let scaled = g * self.scale;
        if self.coupled { self.wd.fma(p, scaled) } else { scaled }
    }

    /// Returns the parameter after its step and its decay.
    #[inline(always)]
    pub(crate) fn descend(&self, p: T, step: T) -> T {
        p - self.lw.fma(p, step)
    }
}

/// Implements `common` for a rule with these fields.
macro_rules! common {
    () => {
        fn common(&self) -> $crate::engine::frame::Common {
            let Self { weight_decay, decay, maximize, .. } = *self;
            $crate::engine::frame::Common { weight_decay, decay, maximize }
        }
    };
}

/// Implements [`Rule::update_on`](crate::Rule::update_on) for a rule with one of these numbers of state vectors, as one pass.
macro_rules! update_on {
    ($($states:literal)* or $last:literal) => {
        fn reach(&self, lr: f64, _: Option<(usize, usize)>) -> f64 {
            self.common().reach(lr)
        }

        fn update_on(
            &self,
            isa: $crate::Isa,
            flat: $crate::Flat<'_, '_>,
            segments: &[$crate::Segment],
            scalars: &$crate::Scalars,
            queue: &meshstep_tensor::Queue,
        ) -> Result<(), $crate::Error> {
            self.check()?;
            let on = $crate::engine::cpu::Cpu { isa, threads: queue.threads() };
            match self.state().len() {
                $($states => $crate::engine::pass::pass::<$states>(self, self, on, flat, segments, scalars),)*
                _ => $crate::engine::pass::pass::<$last>(self, self, on, flat, segments, scalars),
            }
        }
    };
}
pub(crate) use {common, update_on};
