//! SGD, slow and obvious: the definition. Letters and formula: mod.rs.

use super::Constants;
use crate::number::{Real, Stored};

/// One step of every element.
pub(super) fn update<T: Real, G: Stored<T>>(c: &Constants<T>, p: &mut [T], g: &[G], mut b: Option<&mut [T]>) {
    for i in 0..p.len() {
        let mut g1 = g[i].widen_plainly() * c.scale;
        if c.decay {
            g1 = c.wd.fma(p[i], g1);
        }
        let mut u = g1;
        if let Some(b) = &mut b {
            b[i] = if c.first { g1 } else { c.mu.fma(b[i], c.w * g1) };
            u = if c.nesterov { c.mu.fma(b[i], g1) } else { b[i] };
        }
        p[i] = c.minus_lr.fma(u, p[i]);
    }
}
