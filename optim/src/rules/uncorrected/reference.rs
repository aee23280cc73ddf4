//! One element of Adam without corrections, slow and obvious: the definition. Notation and formula: mod.rs.

use super::Constants;
use crate::precision::number::Real;

/// Computes one step; `s` is m, v.
pub(super) fn step<T: Real>(c: &Constants<T>, p: T, g: T, [m, v]: [T; 2]) -> (T, [T; 2]) {
    let mut g1 = g * c.frame.scale;
    if c.frame.coupled {
        g1 = c.frame.wd.fma(p, g1);
    }
    if g1 > c.clip {
        g1 = c.clip;
    }
    if g1 < c.minus_clip {
        g1 = c.minus_clip;
    }
    let m = c.w1.fma(g1 - m, m);
    let v = (c.w2 * g1).fma(g1, c.b2 * v);
    let den = (v + c.l2).root();
    (p - c.frame.lw.fma(p, (c.lr * m) / den), [m, v])
}
