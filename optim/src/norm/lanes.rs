//! Sums side by side that go on from block to block.
//!
//! With `M` of block.rs for `2^(b + 9)`, `2^9` terms up to `2^b` in turn meet such a sum: its grid is `2^(b - 42)`, and what a
//! term leaves is at most `2^(b - 43)`. What the terms of all 16 lanes leave is at most `2^(b - 30)` together: if every term
//! is a multiple of `2^(b - 83)`, they are added in 53 bits without rounding. For squares of f32 that is so unless the smallest
//! magnitude is below `2^-17` of the largest, which is known from the two beforehand; for products unless the spans of both factors
//! are together more than 35 bits. Signs do not matter: all of this is of magnitudes.

use super::ExactSum;
use super::block::{Ahead, Bits, GRIDS, grids, in_range, magic};
use meshstep_tensor::fetch::fetch;

/// Sums that run side by side, for the compiler to spread over registers, and the terms of each: `2^PER_LANE`.
pub(super) const LANES: usize = 16;
const PER_LANE: i32 = 9;
const ALL: i32 = PER_LANE + LANES.ilog2() as i32;

/// Bits from the largest term to the last bit of any below which what the lanes leave is summed without rounding.
const SPAN: i32 = 53 + GRIDS + 1 - PER_LANE - ALL;

/// Terms up to `2^bound` on their way to an exact sum.
pub(crate) struct Lanes {
    bound: i32,
    /// Terms that every lane still takes; 0 where there are no sums.
    left: usize,
    sums: [f64; LANES],
    rests: [f64; LANES],
}

impl Lanes {
    /// No terms.
    #[inline(always)]
    pub(super) fn new() -> Self {
        Lanes { bound: 0, left: 0, sums: [magic(PER_LANE); LANES], rests: [0.0; LANES] }
    }

    /// Whether lanes hold such terms.
    #[inline(always)]
    pub(super) fn hold(Bits { last, bound }: Bits) -> bool {
        last >= bound - SPAN && in_range(bound + PER_LANE)
    }

    /// Adds the term of each pair of elements. `term` adds a pair's term to a constant, rounding once.
    #[inline(always)]
    pub(super) fn add<X: Copy>(
        &mut self,
        (xs, ys): (&[X], &[X]),
        term: impl Fn(X, X, f64) -> f64,
        bits: Bits,
        ahead: Ahead,
        sum: &mut ExactSum,
    ) {
        self.make_room(xs.len(), bits, sum);
        let one = |x: X, y: X, sum: &mut f64, rest: &mut f64| {
            let next = term(x, y, *sum);
            *rest += term(x, y, *sum - next);
            *sum = next;
        };
        let ((x_parts, x_last), (y_parts, y_last)) = (xs.as_chunks::<LANES>(), ys.as_chunks::<LANES>());
        // Copies, which stay in registers meanwhile.
        let (mut sums, mut rests) = (self.sums, self.rests);
        for (part, (x, y)) in x_parts.iter().zip(y_parts).enumerate() {
            fetch(ahead.next.wrapping_add(part * ahead.bytes), ahead.bytes);
            for lane in 0..LANES {
                one(x[lane], y[lane], &mut sums[lane], &mut rests[lane]);
            }
        }
        (self.sums, self.rests) = (sums, rests);
        let last = x_last.iter().zip(y_last).zip(self.sums.iter_mut().zip(&mut self.rests));
        last.for_each(|((x, y), (sum, rest))| one(*x, *y, sum, rest));
    }

    /// Lets the lanes take `terms` more between these bits.
    #[inline(always)]
    fn make_room(&mut self, terms: usize, Bits { last, bound }: Bits, sum: &mut ExactSum) {
        let terms = terms.div_ceil(LANES);
        if self.left < terms || bound > self.bound || last < self.bound - SPAN {
            self.deposit(sum);
            (self.bound, self.left) = (bound, 1 << PER_LANE);
            self.sums = [magic(bound + PER_LANE); LANES];
        }
        self.left -= terms;
    }

    /// Adds what the lanes hold to `sum`, and empties them.
    #[inline(always)]
    pub(super) fn deposit(&mut self, sum: &mut ExactSum) {
        let start = magic(self.bound + PER_LANE);
        let counted = self.sums.iter().fold(0u64, |all, sum| all.wrapping_add(sum.to_bits()));
        sum.add_integer(grids(counted, start, LANES), self.bound + PER_LANE - GRIDS);
        // In pairs, which is quicker than in a row and as exact.
        let mut half = LANES / 2;
        while half > 0 {
            let (left, right) = self.rests.split_at_mut(half);
            left.iter_mut().zip(right).for_each(|(l, r)| *l += *r);
            half /= 2;
        }
        sum.add(self.rests[0]);
        *self = Lanes::new();
    }
}
