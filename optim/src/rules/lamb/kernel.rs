//! One element of LAMB, in a form that vectorises. Notation: mod.rs. Must equal reference.rs.

use super::Constants;
use crate::engine::sweep::Step;
use crate::norm::tensor_sums::Direction;
use crate::precision::number::Real;

impl<T: Real> Constants<T> {
    /// Returns direction and moments.
    #[inline(always)]
    fn moved(&self, p: T, g: T, [m, v]: [T; 2]) -> (T, [T; 2]) {
        let c = self;
        let g1 = g * c.scale;
        let m = c.w1.fma(g1 - m, m);
        let v = (c.w2 * g1).fma(g1, c.b2 * v);
        let den = v.root().div_by(c.bc2s_divisor) + c.eps;
        (c.wd.fma(p, (c.k * m) / den), [m, v])
    }
}

impl<T: Real> Step<T, 2> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, s: [T; 2]) -> (T, [T; 2]) {
        let (r, s) = self.moved(p, g, s);
        (self.minus_lr.fma(r, p), s)
    }

    fn reference(&self, p: T, g: T, s: [T; 2]) -> (T, [T; 2]) {
        super::reference::step(self, p, g, s)
    }
}

impl<T: Real> Direction<T, 2> for Constants<T> {
    const OF_STATE: bool = true;

    #[inline(always)]
    fn direction(&self, p: T, g: T, s: [T; 2]) -> T {
        self.moved(p, g, s).0
    }
}
