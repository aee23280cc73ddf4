//! One element of SGD, for loops that become vector instructions. Letters: mod.rs. It must equal reference.rs.

use super::{Constants, reference};
use crate::number::Real;
use crate::sweep::Step;

impl<T: Real> Constants<T> {
    /// The gradient, scaled and with its penalty.
    #[inline(always)]
    fn gradient(&self, p: T, g: T) -> T {
        let scaled = g * self.scale;
        if self.decay { self.wd.fma(p, scaled) } else { scaled }
    }
}

impl<T: Real> Step<T, 0> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, _: [T; 0]) -> (T, [T; 0]) {
        (self.minus_lr.fma(self.gradient(p, g), p), [])
    }

    fn reference(&self, p: T, g: T, _: [T; 0]) -> (T, [T; 0]) {
        (reference::step(self, p, g, None).0, [])
    }
}

impl<T: Real> Step<T, 1> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, [b]: [T; 1]) -> (T, [T; 1]) {
        let g1 = self.gradient(p, g);
        // Selected, not mixed in with weight 0: what the buffer held before the first step may be NaN.
        let b = if self.first { g1 } else { self.mu.fma(b, self.w * g1) };
        let u = if self.nesterov { self.mu.fma(b, g1) } else { b };
        (self.minus_lr.fma(u, p), [b])
    }

    fn reference(&self, p: T, g: T, [b]: [T; 1]) -> (T, [T; 1]) {
        let (p, after) = reference::step(self, p, g, Some(b));
        (p, [after.unwrap_or(b)])
    }
}
