//! One element of ADOPT, slow and obvious: the definition. Notation and formula: mod.rs.

use super::Constants;
use crate::precision::number::Real;

/// Computes one step; `s` is the moments, then v.
pub(super) fn step<T: Real, const S: usize>(c: &Constants<T>, p: T, g: T, mut s: [T; S]) -> (T, [T; S]) {
    let mut g1 = g * c.frame.scale;
    if c.frame.coupled {
        g1 = c.frame.wd.fma(p, g1);
    }
    let Some((v, moments)) = s.split_last_mut() else { return (p, s) };
    if c.first {
        *v = g1 * g1;
        return (p, s);
    }
    let mut den = v.root();
    if den < c.eps {
        den = c.eps;
    }
    let mut h = g1 / den;
    if h > c.bound {
        h = c.bound;
    } else if h < c.minus_bound {
        h = c.minus_bound;
    }
    let mut u = c.mix.q0 * h;
    for (j, m) in moments.iter_mut().enumerate() {
        *m = c.mix.w[j].fma(h - *m, *m);
        u = c.mix.q[j].fma(*m, u);
    }
    *v = (c.w2 * g1).fma(g1, c.b2 * *v);
    (p - c.frame.lw.fma(p, c.lr * u), s)
}
