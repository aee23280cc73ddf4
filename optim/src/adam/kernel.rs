//! One element of Adam, for loops that become vector instructions. Letters: mod.rs. It must equal reference.rs.

use super::Constants;
use crate::number::Real;
use crate::sweep::Step;

impl<T: Real> Step<T, 2> for Constants<T> {
    #[inline(always)]
    fn step(&self, p: T, g: T, [m, v]: [T; 2]) -> (T, [T; 2]) {
        let c = self;
        let scaled = g * c.scale;
        let g1 = if c.coupled { c.wd.fma(p, scaled) } else { scaled };
        let m = c.w1.fma(g1 - m, m);
        let v = (c.w2 * g1).fma(g1, c.b2 * v);
        let den = v.root().div_by(c.bc2s_divisor) + c.eps;
        let p = p - c.lw.fma(p, (c.step * m) / den);
        (p, [m, v])
    }

    fn reference(&self, p: T, g: T, s: [T; 2]) -> (T, [T; 2]) {
        super::reference::step(self, p, g, s)
    }
}
