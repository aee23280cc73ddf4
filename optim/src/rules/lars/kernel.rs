//! One element of LARS, in a form that vectorises. Notation: mod.rs. Must equal reference.rs.

use super::Constants;
use crate::engine::sweep::Step;
use crate::norm::tensor_sums::Direction;
use crate::precision::number::Real;

impl<T: Real> Step<T, 1> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, [b]: [T; 1]) -> (T, [T; 1]) {
        let d = self.wd.fma(p, self.direction(p, g, [b]));
        let b = self.mu.fma(b, self.local * d);
        (p - b, [b])
    }

    fn reference(&self, p: T, g: T, s: [T; 1]) -> (T, [T; 1]) {
        super::reference::step(self, p, g, s)
    }
}

impl<T: Real> Direction<T, 1> for Constants<T> {
    const OF_STATE: bool = false;

    #[inline(always)]
    fn direction(&self, _: T, g: T, _: [T; 1]) -> T {
        g * self.scale
    }
}
