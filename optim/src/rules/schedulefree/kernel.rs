//! One element of schedule-free AdamW, in a form that vectorises. Notation: mod.rs. Must equal reference.rs.

use super::Constants;
use crate::engine::sweep::Step;
use crate::precision::number::Real;

impl<T: Real> Step<T, 2> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, [z, v]: [T; 2]) -> (T, [T; 2]) {
        let con = self;
        let g1 = con.frame.gradient(p, g);
        let v = (con.w2 * g1).fma(g1, con.b2 * v);
        let den = v.root().div_by(con.bc2s_divisor) + con.eps;
        let d = con.frame.lw.fma(p, (con.lr * g1) / den);
        let z = if con.first { p } else { z };
        (con.k.fma(d, con.c.fma(z - p, p)), [z - d, v])
    }

    fn reference(&self, p: T, g: T, s: [T; 2]) -> (T, [T; 2]) {
        super::reference::step(self, p, g, s)
    }
}
