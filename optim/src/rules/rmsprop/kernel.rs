//! One element of RMSprop, in a form that vectorises. Notation: mod.rs. Must equal reference.rs.

use super::Constants;
use crate::engine::sweep::Step;
use crate::precision::number::Real;

/// States are square_avg, then grad_avg if centered, then momentum if there is any.
impl<T: Real, const S: usize> Step<T, S> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, mut s: [T; S]) -> (T, [T; S]) {
        let c = self;
        // Compile-time constants except for S = 2, so that the loop checks no index.
        let centered = S == 3 || S == 2 && c.centered;
        let momentum = S == 3 || S == 2 && !c.centered;
        let g1 = c.frame.gradient(p, g);
        s[0] = (c.w * g1).fma(g1, c.a * s[0]);
        let mut var = s[0];
        if centered {
            let ga = c.w.fma(g1 - s[1], s[1]);
            let zero = T::from_f64(0.0);
            let rest = (zero - ga).fma(ga, var);
            var = if rest < zero { zero } else { rest };
            s[1] = ga;
        }
        let mut u = g1 / (var.root() + c.eps);
        if momentum {
            u = c.mu.fma(s[S - 1], u);
            s[S - 1] = u;
        }
        (c.frame.descend(p, c.lr * u), s)
    }

    fn reference(&self, p: T, g: T, s: [T; S]) -> (T, [T; S]) {
        super::reference::step(self, p, g, s)
    }
}
