//! One element of Adam, in a form that vectorises. Notation: mod.rs. Must equal reference.rs.

use super::Constants;
use crate::engine::sweep::Step;
use crate::precision::number::Real;

/// States are m and v, or m, v and vmax.
impl<T: Real, const S: usize> Step<T, S> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, mut s: [T; S]) -> (T, [T; S]) {
        let c = self;
        let g1 = c.frame.gradient(p, g);
        s[0] = c.w1.fma(g1 - s[0], s[0]);
        s[1] = (c.w2 * g1).fma(g1, c.b2 * s[1]);
        if S == 3 {
            s[2] = larger(s[2], s[1]);
        }
        let den = s[S - 1].root().div_by(c.bc2s_divisor) + c.eps;
        (c.frame.descend(p, (c.step * s[0]) / den), s)
    }

    fn reference(&self, p: T, g: T, s: [T; S]) -> (T, [T; S]) {
        super::reference::step(self, p, g, s)
    }
}

/// Returns the larger number; NaN if one is NaN.
#[inline(always)]
fn larger<T: Real>(x: T, y: T) -> T {
    if y > x {
        y
    } else if y <= x {
        x
    } else {
        x + y
    }
}
