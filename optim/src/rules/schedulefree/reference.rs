//! One element of schedule-free AdamW, slow and obvious: the definition. Notation and formula: mod.rs.

use super::Constants;
use crate::precision::number::Real;

/// Computes one step from `y`, with state `z` and `v`.
pub(super) fn step<T: Real>(con: &Constants<T>, y: T, g: T, [mut z, mut v]: [T; 2]) -> (T, [T; 2]) {
    let g1 = g * con.frame.scale;
    v = (con.w2 * g1).fma(g1, con.b2 * v);
    let den = v.root() / con.bc2s + con.eps;
    let d = con.frame.lw.fma(y, (con.lr * g1) / den);
    if con.first {
        z = y;
    }
    let averaged = con.c.fma(z - y, y);
    (con.k.fma(d, averaged), [z - d, v])
}
