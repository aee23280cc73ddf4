//! One element of RMSprop, slow and obvious: the definition. Notation and formula: mod.rs.

use super::Constants;
use crate::precision::number::Real;

/// Computes one step; `s` is square_avg, then grad_avg if centered, then momentum if there is any.
pub(super) fn step<T: Real, const S: usize>(c: &Constants<T>, p: T, g: T, mut s: [T; S]) -> (T, [T; S]) {
    let mut g1 = g * c.frame.scale;
    if c.frame.coupled {
        g1 = c.frame.wd.fma(p, g1);
    }
    let (square_avg, mut others) = s.split_at_mut(1);
    square_avg[0] = (c.w * g1).fma(g1, c.a * square_avg[0]);
    let mut var = square_avg[0];
    if c.centered {
        let (grad_avg, momentum) = others.split_at_mut(1);
        grad_avg[0] = c.w.fma(g1 - grad_avg[0], grad_avg[0]);
        let minus = T::from_f64(-1.0) * grad_avg[0];
        var = minus.fma(grad_avg[0], var);
        if var < T::from_f64(0.0) {
            var = T::from_f64(0.0);
        }
        others = momentum;
    }
    let mut u = g1 / (var.root() + c.eps);
    if let [momentum] = others {
        *momentum = c.mu.fma(*momentum, u);
        u = *momentum;
    }
    (p - c.frame.lw.fma(p, c.lr * u), s)
}
