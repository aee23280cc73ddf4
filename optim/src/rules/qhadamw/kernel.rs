//! One element of QHAdamW, in a form that vectorises. Notation: mod.rs. Must equal reference.rs.

use super::Constants;
use crate::engine::sweep::Step;
use crate::precision::number::Real;

/// States are the moments, then v.
impl<T: Real, const S: usize> Step<T, S> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, mut s: [T; S]) -> (T, [T; S]) {
        let c = self;
        let g1 = c.frame.gradient(p, g);
        let u = c.mix.step(g1, &mut s);
        let v = (c.w2 * g1).fma(g1, c.b2 * s[S - 1]);
        s[S - 1] = v;
        let den = v.root().div_by(c.bc2s_divisor) + c.eps;
        (c.frame.descend(p, (c.lr * u) / den), s)
    }

    fn reference(&self, p: T, g: T, s: [T; S]) -> (T, [T; S]) {
        super::reference::step(self, p, g, s)
    }
}
