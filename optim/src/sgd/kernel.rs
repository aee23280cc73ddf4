//! One element of SGD, for loops that become vector instructions. Letters: mod.rs. It must equal reference.rs.

use super::Constants;
use crate::number::Real;
use crate::sweep::Step;

/// Without state, or with the momentum buffer.
impl<T: Real, const S: usize> Step<T, S> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, mut s: [T; S]) -> (T, [T; S]) {
        let c = self;
        let g1 = c.frame.gradient(p, g);
        let mut u = g1;
        if S == 1 {
            let (b, x) = (s[0], c.w * g1);
            // Selected, not mixed in with weight 0: what the buffer held before the first step may be NaN.
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
