//! One element of SGD, in a form that vectorises. Notation: mod.rs. Must equal reference.rs.

use super::Constants;
use crate::engine::sweep::Step;
use crate::precision::number::Real;

/// No state, or the momentum buffer.
impl<T: Real, const S: usize> Step<T, S> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, mut s: [T; S]) -> (T, [T; S]) {
        let c = self;
        let g1 = c.frame.gradient(p, g);
        let mut u = g1;
        if S == 1 {
            let (b, x) = (s[0], c.w * g1);
            // Selected, not multiplied by 0: before the first step the buffer may hold NaN.
            let sum = if c.first { x } else { c.mu.fma(b, x) };
            let b = if c.average { c.w.fma(g1 - b, b) } else { sum };
            u = if c.nesterov { c.mu.fma(b, g1) } else { b };
            s[0] = b;
        }
        (c.frame.descend(p, c.r * u), s)
    }

    fn reference(&self, p: T, g: T, s: [T; S]) -> (T, [T; S]) {
        super::reference::step(self, p, g, s)
    }
}
