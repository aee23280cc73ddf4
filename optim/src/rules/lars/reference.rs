//! One element of LARS, slow and obvious: the definition. Notation and formula: mod.rs.

use super::Constants;
use crate::precision::number::Real;

/// Computes one step.
pub(super) fn step<T: Real>(c: &Constants<T>, p: T, g: T, [b]: [T; 1]) -> (T, [T; 1]) {
    let g1 = g * c.scale;
    let d = c.wd.fma(p, g1);
    let b = c.mu.fma(b, c.local * d);
    (p - b, [b])
}
