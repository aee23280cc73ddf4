//! One element of SGD, slow and obvious: the definition. Letters and formula: mod.rs.

use super::Constants;
use crate::number::Real;

/// One step; the buffer where there is momentum.
pub(super) fn step<T: Real>(c: &Constants<T>, p: T, g: T, b: Option<T>) -> (T, Option<T>) {
    let mut g1 = g * c.scale;
    if c.decay {
        g1 = c.wd.fma(p, g1);
    }
    let Some(b) = b else { return (c.minus_lr.fma(g1, p), None) };
    let b = if c.first { g1 } else { c.mu.fma(b, c.w * g1) };
    let u = if c.nesterov { c.mu.fma(b, g1) } else { b };
    (c.minus_lr.fma(u, p), Some(b))
}
