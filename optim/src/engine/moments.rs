//! Several slow moments of a gradient, each with a decay and a weight in the step.

use crate::Error;
use crate::engine::check::Check;
use crate::precision::number::Real;

/// One to four slow moments: pairs of a decay `beta` and a weight `w`. A step mixes `(1 - sum w) g + sum w_j u_j` of the gradient `g` and
/// the moments `u_j`.
///
/// One pair is the quasi-hyperbolic momentum of Ma and Yarats, *Quasi-hyperbolic momentum and Adam for deep learning* (2019), with the
/// weight as nu. Several pairs are those of MT-DAO, multi-timescale distributed adaptive optimizers.
///
/// ```
/// use meshstep_optim::{Moments, QhAdamW, Rule};
///
/// let one = QhAdamW { moments: Moments::one(0.995, 0.7), ..QhAdamW::default() };
/// assert_eq!(one.state(), ["m", "v"]);
/// let two = QhAdamW { moments: Moments::new(&[(0.9, 0.5), (0.999, 0.4)])?, ..QhAdamW::default() };
/// assert_eq!(two.state(), ["m0", "m1", "v"]);
/// # Ok::<(), meshstep_optim::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moments {
    pub(crate) pairs: [(f64, f64); Moments::MAX],
    pub(crate) len: usize,
}

impl Moments {
    /// Maximum number of moments.
    pub const MAX: usize = 4;

    /// Creates a single moment.
    pub const fn one(beta: f64, weight: f64) -> Self {
        Moments { pairs: [(beta, weight), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)], len: 1 }
    }

    /// Creates moments from 1 to 4 pairs of `(beta, weight)`. A rule's `check` validates the values: each beta in `[0, 1)`, weights of at
    /// least 0 and together at most 1.
    pub fn new(given: &[(f64, f64)]) -> Result<Self, Error> {
        let check = Check { rule: "moments" };
        let good = (1..=Self::MAX).contains(&given.len());
        check.range("len", given.len() as f64, good, "1 to 4 pairs of beta and weight")?;
        let mut pairs = [(0.0, 0.0); Self::MAX];
        pairs.iter_mut().zip(given).for_each(|(pair, given)| *pair = *given);
        Ok(Moments { pairs, len: given.len() })
    }

    /// Returns the pairs of `(beta, weight)`.
    pub fn pairs(&self) -> &[(f64, f64)] {
        &self.pairs[..self.len]
    }

    /// Returns the state names of a rule with these moments and `v`.
    pub(crate) fn state(&self) -> &'static [&'static str] {
        match self.len {
            1 => &["m", "v"],
            2 => &["m0", "m1", "v"],
            3 => &["m0", "m1", "m2", "v"],
            _ => &["m0", "m1", "m2", "m3", "v"],
        }
    }

    pub(crate) fn check(&self, check: &Check) -> Result<(), Error> {
        for &(beta, weight) in self.pairs() {
            check.beta("beta1", beta)?;
            check.range("weight", weight, (0.0..=1.0).contains(&weight), "a weight >= 0 and <= 1")?;
        }
        let sum = self.sum();
        check.range("the sum of weights", sum, sum <= 1.0, "weights of at most 1 together")
    }

    /// Returns the sum of the weights; the gradient has the rest up to 1. A sum within rounding error of 1 counts as 1.
    pub(crate) fn sum(&self) -> f64 {
        let sum = self.pairs().iter().map(|(_, weight)| weight).sum::<f64>();
        if (sum - 1.0).abs() < 1e-12 { 1.0 } else { sum }
    }

    /// Calls `each` with the pairs as hyperparameters.
    pub(crate) fn tell(&self, each: &mut dyn FnMut(&'static str, f64)) {
        const NAMES: [(&str, &str); Moments::MAX] = [
            ("beta1", "weight"),
            ("beta1 of m1", "weight of m1"),
            ("beta1 of m2", "weight of m2"),
            ("beta1 of m3", "weight of m3"),
        ];
        for ((beta, weight), values) in NAMES.into_iter().zip(self.pairs()) {
            each(beta, values.0);
            each(weight, values.1);
        }
    }

    /// Returns the constants of a step in which moment `j` counts for `weight / correction(beta)`.
    pub(crate) fn mix<T: Real>(&self, correction: impl Fn(f64) -> f64) -> Mix<T> {
        Mix {
            w: self.pairs.map(|(beta, _)| T::from_f64(1.0 - beta)),
            q: self.pairs.map(|(beta, weight)| T::from_f64(weight / correction(beta))),
            q0: T::from_f64(1.0 - self.sum()),
        }
    }
}

/// Constants of this sequence for one element:
///
/// ```text
/// m_j = fma(w_j, x - m_j, m_j)     w_j = 1 - beta_j
/// u   = q0 * x                     q0 = 1 - sum of the weights
/// u   = fma(q_j, m_j, u)           in order of j; q_j = weight_j / correction
/// ```
#[derive(Clone, Copy)]
pub(crate) struct Mix<T> {
    pub(crate) w: [T; Moments::MAX],
    pub(crate) q: [T; Moments::MAX],
    pub(crate) q0: T,
}

impl<T: Real> Mix<T> {
    /// Moves the moments, all of `s` but the last, towards `x`, and mixes them.
    #[inline(always)]
    pub(crate) fn step<const S: usize>(&self, x: T, s: &mut [T; S]) -> T {
        let mut u = self.q0 * x;
        for (j, m) in s[..S - 1].iter_mut().enumerate() {
            *m = self.w[j].fma(x - *m, *m);
            u = self.q[j].fma(*m, u);
        }
        u
    }
}
