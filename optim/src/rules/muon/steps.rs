//! Elements before and after the orthogonalisation: momentum, and the step of the parameters.

use super::Muon;
use crate::engine::elementwise::Step;
use crate::precision::number::Real;

/// Update of the buffer; the parameter becomes the element of the matrix to orthogonalise.
#[derive(Clone, Copy, Debug)]
pub(super) struct Momentum<T> {
    scale: T,
    /// 1 - momentum, and momentum.
    w: T,
    mu: T,
    nesterov: bool,
    decaying_sum: bool,
}

impl<T: Real> Momentum<T> {
    pub(super) fn new(rule: &Muon, grad_scale: f64) -> Self {
        let sign = if rule.maximize { -1.0 } else { 1.0 };
        Momentum {
            scale: T::from_f64(sign * grad_scale),
            w: T::from_f64(1.0 - rule.momentum),
            mu: T::from_f64(rule.momentum),
            nesterov: rule.nesterov,
            decaying_sum: rule.decaying_sum,
        }
    }
}

impl<T: Real> Step<T, 1> for Momentum<T> {
    #[inline(always)]
    fn step(&self, _: T, g: T, [before]: [T; 1]) -> (T, [T; 1]) {
        let g1 = g * self.scale;
        let b = if self.decaying_sum { self.mu.fma(before, g1) } else { self.w.fma(g1 - before, before) };
        let u = match (self.nesterov, self.decaying_sum) {
            (true, true) => self.mu.fma(b, g1),
            (true, false) => self.mu.fma(b - g1, g1),
            (false, _) => b,
        };
        (u, [b])
    }
}

/// Step of the parameter along the orthogonalised matrix, which takes the gradient's place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descent<T> {
    length: T,
    lw: T,
}

impl<T: Real> Descent<T> {
    pub(super) fn new(length: f64, lw: f64) -> Self {
        Descent { length: T::from_f64(length), lw: T::from_f64(lw) }
    }
}

impl<T: Real> Step<T, 0> for Descent<T> {
    #[inline(always)]
    fn step(&self, p: T, o: T, []: [T; 0]) -> (T, [T; 0]) {
        (p - self.lw.fma(p, self.length * o), [])
    }
}
