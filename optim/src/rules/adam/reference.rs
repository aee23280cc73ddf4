//! One element of Adam, slow and obvious: the definition. Notation and formula: mod.rs.

use super::Constants;
use crate::precision::number::Real;
use std::cmp::Ordering;

/// Computes one step; `s` is m, v and, with AMSGrad, vmax.
pub(super) fn step<T: Real, const S: usize>(c: &Constants<T>, p: T, g: T, mut s: [T; S]) -> (T, [T; S]) {
    let mut g1 = g * c.frame.scale;
    if c.frame.coupled {
        g1 = c.frame.wd.fma(p, g1);
    }
    let m = c.w1.fma(g1 - s[0], s[0]);
    let v = (c.w2 * g1).fma(g1, c.b2 * s[1]);
    (s[0], s[1]) = (m, v);
    let mut second = v;
    if S == 3 {
        s[2] = match v.partial_cmp(&s[2]) {
            Some(Ordering::Greater) => v,
            Some(_) => s[2],
            None => v + s[2], // NaN
        };
        second = s[2];
    }
    let den = second.root() / c.bc2s + c.eps;
    let p = p - c.frame.lw.fma(p, (c.step * m) / den);
    (p, s)
}
