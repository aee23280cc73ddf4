//! One element of Lion, in a form that vectorises. Notation: mod.rs. Must equal reference.rs.

use super::Constants;
use crate::engine::sweep::Step;
use crate::precision::number::Real;

impl<T: Real> Step<T, 1> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, [m]: [T; 1]) -> (T, [T; 1]) {
        let c = self;
        let g1 = c.frame.gradient(p, g);
        let u = c.w1.fma(g1 - m, m);
        let m = c.w2.fma(g1 - m, m);
        let zero = T::from_f64(0.0);
        // `u` is a zero or NaN here, and the product keeps it.
        let step = if u > zero {
            c.lr
        } else if u < zero {
            c.minus_lr
        } else {
            c.lr * u
        };
        (c.frame.descend(p, step), [m])
    }

    fn reference(&self, p: T, g: T, s: [T; 1]) -> (T, [T; 1]) {
        super::reference::step(self, p, g, s)
    }
}
