//! Schedule-free AdamW: Defazio, Yang, Mehta, Mishchenko, Khaled and Cutkosky, *The Road Less Scheduled* (2024), with the meaning and
//! the defaults of the authors' program (`AdamWScheduleFree` of the Python package `schedulefree`, version 1.4.1).
//!
//! Three points of each parameter: `z`, which the gradient moves; `x`, the average of all `z`, which a model is evaluated with; and
//! `y = beta1 x + (1 - beta1) z`, where gradients are taken. Parameters hold `y`. State is `z` and `v`; `x` follows from `y` and `z`.
//!
//! One IEEE sequence per element, in the type of the parameters:
//!
//! ```text
//! g1  = g * scale                           grad_scale, negated to maximise
//! v   = fma(w2 * g1, g1, b2 * v)            w2 = 1 - beta2, b2 = beta2
//! den = sqrt(v) / bc2s + eps                bc2s = sqrt(1 - beta2^t)
//! d   = fma(lw, y, (lr_t * g1) / den)       lr_t = lr min(1, t / warmup_steps); lw = lr_t weight_decay
//! z   = y                                   at t = 1 only: the stored value is ignored
//! y   = fma(k, d, fma(c, z - y, y))         c: the average's share; k = beta1 (1 - c) - 1
//! z   = z - d
//!
//! x   = fma(1 - 1 / beta1, z - y, y)        for evaluation, by the rule that `evaluation` returns
//! ```
//!
//! `c = w_t / (w_1 + ... + w_t)` with `w_t = t^r min(1, t / warmup_steps)^weight_lr_power` is a function of `t` alone, so that the rule
//! needs no state besides its vectors (averaging.rs). The program weighs by the largest rate so far instead of the warm-up. Both are the
//! same for a rate that is constant apart from `warmup_steps`, or falls after them. They differ if the caller's rate rises (a warm-up by a
//! schedule, a second peak), or falls during the warm-up: then the average here does not follow the rate.

mod averaging;
mod evaluation;
mod kernel;
mod reference;

use crate::engine::check::Check;
use crate::engine::frame::{Common, Frame, update_on};
use crate::engine::pass::PassKind;
use crate::precision::number::{Real, power};
use crate::{Decay, Error, Rule, Scalars, Segment, StateSlot, cuda};
use averaging::Averaging;
use evaluation::EvaluationPoint;

/// AdamW without a learning-rate schedule: a running average of the parameters takes the place of a falling rate (Defazio et al., *The
/// Road Less Scheduled*, 2024). Give every step the same rate, and warm up by `warmup_steps`.
///
/// Each gradient moves `z` by AdamW's step without a first moment; `x` is the average of all `z`, the `t`th with the weight `t^r
/// min(1, t / warmup_steps)^weight_lr_power`; parameters hold `y = beta1 x + (1 - beta1) z`, where gradients are taken. A model is evaluated
/// at `x`: a sharded optimizer goes there and back by `begin_evaluation` and `end_evaluation`, flat memory by the update of
/// [`Rule::evaluation`].
///
/// Weights depend on the update's number alone. The authors' program, `AdamWScheduleFree`, weighs by the largest rate so far: the same
/// for a constant rate, which may fall after the warm-up, but not for a rate that rises, as in a warm-up by a schedule. It counts the
/// steps of a parameter group, and this rule the updates of each parameter, which differ if gradients are missing.
///
/// `z` belongs to `y`: workers that exchange seldom must exchange both at once (`LocalPlan::local_adam`), and who replaces parameters
/// alone in the middle of a run starts a new optimizer with them.
///
/// ```
/// use meshstep_optim::{Flat, Rule, Scalars, ScheduleFreeAdamW, Segment};
/// use meshstep_tensor::Queue;
///
/// let rule = ScheduleFreeAdamW { warmup_steps: 10, ..ScheduleFreeAdamW::default() };
/// let (mut p, mut z, mut v) = ([1f64], [0f64], [0f64]);
/// let update = |rule: &dyn Rule, p: &mut [f64], mut g: [f64; 1], z: &mut [f64], v: &mut [f64], t| {
///     let state = &mut [z.into(), v.into()];
///     let flat = Flat { params: p.into(), grads: (&mut g[..]).into(), state, copy: None, remainder: None };
///     rule.update(flat, &[Segment::new(0..1, t)], &Scalars { lr: 0.1, ..Scalars::default() }, &Queue::cpu())
/// };
/// for t in 1..=100 {
///     let g = [p[0] - 0.25]; // of (p - 0.25)^2 / 2
///     update(&rule, &mut p, g, &mut z, &mut v, t)?;
/// }
/// let mut x = p; // the trained point stays in `p`
/// update(&*rule.evaluation().unwrap(), &mut x, [0.0], &mut z, &mut v, 101)?;
/// assert!((p[0] - (0.9 * x[0] + 0.1 * z[0])).abs() < 1e-15);
/// assert!((x[0] - 0.25).abs() < 0.05);
/// # Ok::<(), meshstep_optim::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ScheduleFreeAdamW {
    /// Weight of the average `x` in `y`, in `(0, 1)`.
    pub beta1: f64,
    /// Decay of the second moment, in `[0, 1)`.
    pub beta2: f64,
    /// Added to the root of the second moment; at least 0.
    pub eps: f64,
    /// Number of updates in which the learning rate rises linearly to its full value; at most 2^40.
    pub warmup_steps: u64,
    /// Power of `t` in the average's weights, from 0 to 4.
    pub r: f64,
    /// Power of the learning rate's warm-up in the average's weights, from 0 to 4.
    pub weight_lr_power: f64,
    /// Decay of the parameters, taken at `y` and applied to `z`; at least 0.
    pub weight_decay: f64,
    /// Maximises instead of minimising.
    pub maximize: bool,
}

impl Default for ScheduleFreeAdamW {
    /// The authors' defaults. Their learning rate is 0.0025.
    fn default() -> Self {
        ScheduleFreeAdamW {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            warmup_steps: 0,
            r: 0.0,
            weight_lr_power: 2.0,
            weight_decay: 0.0,
            maximize: false,
        }
    }
}

/// Largest `warmup_steps`.
const MOST_WARMUP: u64 = 1 << 40;

/// Largest `r` and `weight_lr_power`: with these sums of weights are exact to a few parts in 1e13.
const MOST_POWER: f64 = 4.0;

impl ScheduleFreeAdamW {
    fn common(&self) -> Common {
        let Self { weight_decay, maximize, .. } = *self;
        Common { weight_decay, decay: Decay::Decoupled, maximize }
    }

    fn averaging(&self) -> Averaging {
        Averaging::new(self.warmup_steps, self.r, self.weight_lr_power)
    }
}

impl Rule for ScheduleFreeAdamW {
    fn name(&self) -> &'static str {
        "schedulefree_adamw"
    }

    fn state(&self) -> &'static [&'static str] {
        &["z", "v"]
    }

    fn check(&self) -> Result<(), Error> {
        let check = Check { rule: "schedulefree_adamw" };
        let beta1 = self.beta1 > 0.0 && self.beta1 < 1.0 && ((1.0 / self.beta1) as f32).is_finite();
        check.range("beta1", self.beta1, beta1, "a number > 0 and < 1")?;
        check.beta("beta2", self.beta2)?;
        check.at_least_zero("eps", self.eps)?;
        let warmup = self.warmup_steps <= MOST_WARMUP;
        check.range("warmup_steps", self.warmup_steps as f64, warmup, "0 to 2^40 steps")?;
        for (name, value) in [("r", self.r), ("weight_lr_power", self.weight_lr_power)] {
            check.range(name, value, (0.0..=MOST_POWER).contains(&value), "a power from 0 to 4")?;
        }
        self.common().check(&check)
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        let Self { beta1, beta2, eps, warmup_steps, r, weight_lr_power, .. } = *self;
        let powers = [("r", r), ("weight_lr_power", weight_lr_power)];
        let own = [("beta1", beta1), ("beta2", beta2), ("eps", eps), ("warmup_steps", warmup_steps as f64)];
        own.iter().chain(&powers).for_each(|&(name, value)| each(name, value));
        self.common().tell(&[], each);
    }

    fn slot(&self, slot: usize) -> StateSlot {
        match slot {
            // The first update starts from the parameter.
            0 => StateSlot::average(1.0).at_first(0.0),
            _ => StateSlot::average(self.beta2).of_squares(),
        }
    }

    fn evaluation(&self) -> Option<Box<dyn Rule>> {
        Some(Box::new(EvaluationPoint { beta1: self.beta1 }))
    }

    fn on_device(&self) -> Option<cuda::Hyper> {
        let Averaging { warmup, r, q, zeta_r, zeta_q, offset } = self.averaging();
        let own = [self.beta1, self.beta2, self.eps, warmup, r, q, zeta_r, zeta_q, offset];
        Some(cuda::Hyper::new("schedulefree", &self.common(), &own))
    }

    update_on!(or 2);
}

/// Constants of the sequence above, for one `t`.
#[derive(Clone, Copy)]
pub(crate) struct Constants<T: Real> {
    frame: Frame<T>,
    first: bool,
    b2: T,
    w2: T,
    bc2s: T,
    bc2s_divisor: T::Divisor,
    eps: T,
    lr: T,
    c: T,
    k: T,
}

impl PassKind<2> for ScheduleFreeAdamW {
    type Step<T: Real> = Constants<T>;

    fn constants<T: Real>(&self, scalars: &Scalars, &Segment { t, .. }: &Segment) -> Constants<T> {
        let averaging = self.averaging();
        let (lr, c) = (averaging.warmed_up(scalars.lr, t), averaging.share(t));
        let bc2s = T::from_f64((1.0 - power(self.beta2, t)).sqrt());
        Constants {
            frame: self.common().at(lr, scalars),
            first: t == 1,
            b2: T::from_f64(self.beta2),
            w2: T::from_f64(1.0 - self.beta2),
            bc2s,
            bc2s_divisor: T::divisor(bc2s),
            eps: T::from_f64(self.eps),
            lr: T::from_f64(lr),
            c: T::from_f64(c),
            k: T::from_f64(self.beta1 * (1.0 - c) - 1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_the_device_are_the_host_s() {
        let plain = ScheduleFreeAdamW::default();
        let rules = [
            plain.clone(),
            ScheduleFreeAdamW { warmup_steps: 50, weight_decay: 0.1, ..plain.clone() },
            ScheduleFreeAdamW { warmup_steps: 2000, r: 0.75, maximize: true, ..plain.clone() },
            ScheduleFreeAdamW { warmup_steps: 3, r: 0.1, weight_lr_power: 1.3, ..plain.clone() },
            ScheduleFreeAdamW { warmup_steps: MOST_WARMUP, r: 4.0, weight_lr_power: 4.0, ..plain.clone() },
            ScheduleFreeAdamW { beta1: 0.5, beta2: 0.0, weight_lr_power: 0.0, ..plain },
        ];
        for rule in rules {
            cuda::tests::constants_equal(&rule, |scalars, segment| {
                let c = rule.constants::<f64>(scalars, segment);
                vec![c.frame.lw, c.b2, c.w2, c.bc2s, c.eps, c.lr, c.c, c.k]
            });
        }
    }
}
