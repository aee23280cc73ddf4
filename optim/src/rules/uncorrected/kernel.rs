//! One element of Adam without corrections, in a form that vectorises. Notation: mod.rs. Must equal reference.rs.

use super::Constants;
use crate::engine::sweep::Step;
use crate::precision::number::Real;

impl<T: Real> Step<T, 2> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, [m, v]: [T; 2]) -> (T, [T; 2]) {
        let c = self;
        let mut g1 = c.frame.gradient(p, g);
        g1 = if g1 > c.clip { c.clip } else { g1 };
        g1 = if g1 < c.minus_clip { c.minus_clip } else { g1 };
        let m = c.w1.fma(g1 - m, m);
        let v = (c.w2 * g1).fma(g1, c.b2 * v);
        let den = (v + c.l2).root();
        (c.frame.descend(p, (c.lr * m) / den), [m, v])
    }

    fn reference(&self, p: T, g: T, s: [T; 2]) -> (T, [T; 2]) {
        super::reference::step(self, p, g, s)
    }
}
