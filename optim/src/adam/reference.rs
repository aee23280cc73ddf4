//! Adam, slow and obvious: the definition. Letters and formula: mod.rs.

use super::Constants;
use crate::number::{Real, Stored};

/// One step of every element.
pub(super) fn update<T: Real, G: Stored<T>>(
    c: &Constants<T>,
    p: &mut [T],
    g: &[G],
    m: &mut [T],
    v: &mut [T],
) {
    for i in 0..p.len() {
        let mut g1 = g[i].widen_plainly() * c.scale;
        if c.coupled {
            g1 = c.wd.fma(p[i], g1);
        }
        m[i] = c.w1.fma(g1 - m[i], m[i]);
        v[i] = (c.w2 * g1).fma(g1, c.b2 * v[i]);
        let den = v[i].root() / c.bc2s + c.eps;
        p[i] = p[i] - c.lw.fma(p[i], (c.step * m[i]) / den);
    }
}
