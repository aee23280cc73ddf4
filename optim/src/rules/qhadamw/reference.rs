//! One element of QHAdamW, slow and obvious: the definition. Notation and formula: mod.rs.

use super::Constants;
use crate::precision::number::Real;

/// Computes one step; `s` is the moments, then v.
pub(super) fn step<T: Real, const S: usize>(c: &Constants<T>, p: T, g: T, mut s: [T; S]) -> (T, [T; S]) {
    let mut g1 = g * c.frame.scale;
    if c.frame.coupled {
        g1 = c.frame.wd.fma(p, g1);
    }
    let Some((v, moments)) = s.split_last_mut() else { return (p, s) };
    let mut u = c.mix.q0 * g1;
    for (j, m) in moments.iter_mut().enumerate() {
        *m = c.mix.w[j].fma(g1 - *m, *m);
        u = c.mix.q[j].fma(*m, u);
    }
    *v = (c.w2 * g1).fma(g1, c.b2 * *v);
    let den = v.root() / c.bc2s + c.eps;
    (p - c.frame.lw.fma(p, (c.lr * u) / den), s)
}
