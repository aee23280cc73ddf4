//! One element of Lion, slow and obvious: the definition. Notation and formula: mod.rs.

use super::Constants;
use crate::precision::number::Real;
use std::cmp::Ordering;

/// Computes one step.
pub(super) fn step<T: Real>(c: &Constants<T>, p: T, g: T, [m]: [T; 1]) -> (T, [T; 1]) {
    let mut g1 = g * c.frame.scale;
    if c.frame.coupled {
        g1 = c.frame.wd.fma(p, g1);
    }
    let u = c.w1.fma(g1 - m, m);
    let sign = match u.partial_cmp(&T::from_f64(0.0)) {
        Some(Ordering::Greater) => T::from_f64(1.0),
        Some(Ordering::Less) => T::from_f64(-1.0),
        Some(Ordering::Equal) | None => u,
    };
    (p - c.frame.lw.fma(p, c.lr * sign), [c.w2.fma(g1 - m, m)])
}
