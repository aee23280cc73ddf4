//! One element of Adagrad, slow and obvious: the definition. Notation and formula: mod.rs.

use super::Constants;
use crate::precision::number::Real;

/// Computes one step.
pub(super) fn step<T: Real>(c: &Constants<T>, p: T, g: T, [mut sum]: [T; 1]) -> (T, [T; 1]) {
    let mut g1 = g * c.frame.scale;
    if c.frame.coupled {
        g1 = c.frame.wd.fma(p, g1);
    }
    if c.first {
        sum = c.initial;
    }
    sum = g1.fma(g1, sum);
    let den = sum.root() + c.eps;
    (p - c.frame.lw.fma(p, (c.clr * g1) / den), [sum])
}
