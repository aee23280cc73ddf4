//! One element of SGD, slow and obvious: the definition. Notation and formula: mod.rs.

use super::Constants;
use crate::precision::number::Real;

/// Computes one step; `s` is the buffer, if there is momentum.
pub(super) fn step<T: Real, const S: usize>(c: &Constants<T>, p: T, g: T, s: [T; S]) -> (T, [T; S]) {
    let mut g1 = g * c.frame.scale;
    if c.frame.coupled {
        g1 = c.frame.wd.fma(p, g1);
    }
    let after = s.map(|b| {
        if c.average {
            c.w.fma(g1 - b, b)
        } else if c.first {
            c.w * g1
        } else {
            c.mu.fma(b, c.w * g1)
        }
    });
    let u = match after.first() {
        None => g1,
        Some(&b) if c.nesterov => c.mu.fma(b, g1),
        Some(&b) => b,
    };
    (p - c.frame.lw.fma(p, c.r * u), after)
}
