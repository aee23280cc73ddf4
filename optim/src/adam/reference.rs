//! One element of Adam, slow and obvious: the definition. Letters and formula: mod.rs.

use super::Constants;
use crate::number::Real;

/// One step.
pub(super) fn step<T: Real>(c: &Constants<T>, p: T, g: T, [m, v]: [T; 2]) -> (T, [T; 2]) {
    let mut g1 = g * c.scale;
    if c.coupled {
        g1 = c.wd.fma(p, g1);
    }
    let m = c.w1.fma(g1 - m, m);
    let v = (c.w2 * g1).fma(g1, c.b2 * v);
    let den = v.root() / c.bc2s + c.eps;
    let p = p - c.lw.fma(p, (c.step * m) / den);
    (p, [m, v])
}
