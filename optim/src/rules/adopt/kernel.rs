//! One element of ADOPT, in a form that vectorises. Notation: mod.rs. Must equal reference.rs.

use super::Constants;
use crate::engine::sweep::Step;
use crate::precision::number::Real;

/// States are the moments, then v.
impl<T: Real, const S: usize> Step<T, S> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, mut s: [T; S]) -> (T, [T; S]) {
        let c = self;
        let g1 = c.frame.gradient(p, g);
        if c.first {
            s[S - 1] = g1 * g1;
            return (p, s);
        }
        let root = s[S - 1].root();
        // These comparisons are false for NaN, so NaN passes through.
        let den = if root < c.eps { c.eps } else { root };
        let h = g1 / den;
        let h = if h > c.bound { c.bound } else { h };
        let h = if h < c.minus_bound { c.minus_bound } else { h };
        let u = c.mix.step(h, &mut s);
        s[S - 1] = (c.w2 * g1).fma(g1, c.b2 * s[S - 1]);
        (c.frame.descend(p, c.lr * u), s)
    }

    fn reference(&self, p: T, g: T, s: [T; S]) -> (T, [T; S]) {
        super::reference::step(self, p, g, s)
    }
}
