//! One element of Adagrad, in a form that vectorises. Notation: mod.rs. Must equal reference.rs.

use super::Constants;
use crate::engine::sweep::Step;
use crate::precision::number::Real;

impl<T: Real> Step<T, 1> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, [sum]: [T; 1]) -> (T, [T; 1]) {
        let c = self;
        let g1 = c.frame.gradient(p, g);
        let sum = g1.fma(g1, if c.first { c.initial } else { sum });
        let den = sum.root() + c.eps;
        (c.frame.descend(p, (c.clr * g1) / den), [sum])
    }

    fn reference(&self, p: T, g: T, s: [T; 1]) -> (T, [T; 1]) {
        super::reference::step(self, p, g, s)
    }
}
