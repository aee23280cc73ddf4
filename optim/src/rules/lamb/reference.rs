//! One element of LAMB, slow and obvious: the definition. Notation and formula: mod.rs.

use super::Constants;
use crate::precision::number::Real;

/// Computes one step.
pub(super) fn step<T: Real>(c: &Constants<T>, p: T, g: T, [m, v]: [T; 2]) -> (T, [T; 2]) {
    let g1 = g * c.scale;
    let m = c.w1.fma(g1 - m, m);
    let v = (c.w2 * g1).fma(g1, c.b2 * v);
    let den = v.root() / c.bc2s + c.eps;
    let r = c.wd.fma(p, (c.k * m) / den);
    (c.minus_lr.fma(r, p), [m, v])
}
