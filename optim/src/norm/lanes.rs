//! Parallel sums (lanes) that continue from block to block.
//!
//! With `M` of block.rs for `2^(b + 9)`, one lane takes `2^9` terms up to `2^b` in turn: its grid is `2^(b - 42)`, and a term's rest is
//! at most `2^(b - 43)`. The rests of all terms of all 16 lanes add up to at most `2^(b - 30)`: if every term is a multiple of `2^(b -
//! 83)`, 53 bits hold them without rounding. For squares of f32 this is true unless the smallest magnitude is below `2^-17` of the
//! largest, which the extent tells beforehand; for products unless the spans of both factors exceed 35 bits together. Signs do not
//! matter: all bounds are on magnitudes.

use super::ExactSum;
use super::block::{Ahead, Bits, GRIDS, grids, in_range, magic};
use meshstep_tensor::fetch::fetch;

/// Number of sums side by side, which the compiler spreads over registers, and the terms of each: `2^PER_LANE`.
pub(super) const LANES: usize = 16;
const PER_LANE: i32 = 9;
const ALL: i32 = PER_LANE + LANES.ilog2() as i32;

/// Maximum number of bits from the largest term to the last bit of any term so that the rests sum without rounding.
const SPAN: i32 = 53 + GRIDS + 1 - PER_LANE - ALL;

/// Terms up to `2^bound` on their way to an exact sum.
pub(crate) struct Lanes {
    bound: i32,
    /// Number of terms that every lane can still take; 0 if the lanes are empty.
    left: usize,
    sums: [f64; LANES],
    rests: [f64; LANES],
}

impl Lanes {
    /// Creates empty lanes.
    #[inline(always)]
    pub(super) fn new() -> Self {
        Lanes { bound: 0, left: 0, sums: [magic(PER_LANE); LANES], rests: [0.0; LANES] }
    }

    /// Returns true if lanes can sum terms with this bit range.
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
        // Local copies, which stay in registers.
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

    /// Makes room for `terms` more terms with this bit range.
    #[inline(always)]
    pub(super) fn make_room(&mut self, terms: usize, Bits { last, bound }: Bits, sum: &mut ExactSum) {
        let terms = terms.div_ceil(LANES);
        if self.left < terms || bound > self.bound || last < self.bound - SPAN {
            self.deposit(sum);
            (self.bound, self.left) = (bound, 1 << PER_LANE);
            self.sums = [magic(bound + PER_LANE); LANES];
        }
        self.left -= terms;
    }

    /// Adds the content of the lanes to `sum`, and empties them.
    #[inline(always)]
    pub(super) fn deposit(&mut self, sum: &mut ExactSum) {
        let start = magic(self.bound + PER_LANE);
        let counted = self.sums.iter().fold(0u64, |all, sum| all.wrapping_add(sum.to_bits()));
        sum.add_integer(grids(counted, start, LANES), self.bound + PER_LANE - GRIDS);
        // Pairwise, which is faster than one after another and equally exact.
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

/// Number of sums of [`WholeLanes`]: with those of [`Lanes`] they fit the registers of AVX2.
const WHOLE_LANES: usize = LANES / 2;

/// Lanes for terms that are multiples of the grid and leave no rest.
pub(crate) struct WholeLanes {
    bound: i32,
    left: usize,
    sums: [f64; WHOLE_LANES],
}

impl WholeLanes {
    /// Creates empty lanes.
    #[inline(always)]
    pub(super) fn new() -> Self {
        WholeLanes { bound: 0, left: 0, sums: [magic(PER_LANE); WHOLE_LANES] }
    }

    /// Returns true if terms with this bit range are multiples of the grid.
    #[inline(always)]
    pub(super) fn hold(Bits { last, bound }: Bits) -> bool {
        last >= bound + PER_LANE - GRIDS && in_range(bound + PER_LANE)
    }

    /// Makes room for `terms` more terms with this bit range.
    #[inline(always)]
    pub(super) fn make_room(&mut self, terms: usize, Bits { last, bound }: Bits, sum: &mut ExactSum) {
        let terms = terms.div_ceil(WHOLE_LANES);
        if self.left < terms || bound > self.bound || last < self.bound + PER_LANE - GRIDS {
            self.deposit(sum);
            (self.bound, self.left) = (bound, 1 << PER_LANE);
            self.sums = [magic(bound + PER_LANE); WHOLE_LANES];
        }
        self.left -= terms;
    }

    /// Adds the products of each element of `row` with `ys` here, and those with `xs` to `lanes`. Both have room for them.
    #[inline(always)]
    pub(super) fn add_with(&mut self, lanes: &mut Lanes, [xs, ys, row]: [&[f32]; 3], ahead: Ahead) {
        let ((x_parts, x_last), (y_parts, y_last)) = (xs.as_chunks::<LANES>(), ys.as_chunks::<LANES>());
        let (r_parts, r_last) = row.as_chunks::<LANES>();
        let one = |x: f32, r: f32, sum: &mut f64, rest: &mut f64| {
            let (x, r) = (f64::from(x), f64::from(r));
            let next = x.mul_add(r, *sum);
            *rest += x.mul_add(r, *sum - next);
            *sum = next;
        };
        let whole = |y: f32, r: f32, sum: &mut f64| *sum = f64::from(y).mul_add(f64::from(r), *sum);
        // Local copies, which stay in registers.
        let (mut sums, mut rests, mut wholes) = (lanes.sums, lanes.rests, self.sums);
        for (part, ((x, y), r)) in x_parts.iter().zip(y_parts).zip(r_parts).enumerate() {
            fetch(ahead.next.wrapping_add(part * ahead.bytes), ahead.bytes);
            for lane in 0..LANES {
                one(x[lane], r[lane], &mut sums[lane], &mut rests[lane]);
            }
            for lane in 0..LANES {
                whole(y[lane], r[lane], &mut wholes[lane % WHOLE_LANES]);
            }
        }
        (lanes.sums, lanes.rests, self.sums) = (sums, rests, wholes);
        for (i, (x, r)) in x_last.iter().zip(r_last).enumerate() {
            one(*x, *r, &mut lanes.sums[i], &mut lanes.rests[i]);
        }
        for (i, (y, r)) in y_last.iter().zip(r_last).enumerate() {
            whole(*y, *r, &mut self.sums[i % WHOLE_LANES]);
        }
    }

    /// Adds the content of the lanes to `sum`, and empties them.
    #[inline(always)]
    pub(super) fn deposit(&mut self, sum: &mut ExactSum) {
        let start = magic(self.bound + PER_LANE);
        let counted = self.sums.iter().fold(0u64, |all, sum| all.wrapping_add(sum.to_bits()));
        sum.add_integer(grids(counted, start, WHOLE_LANES), self.bound + PER_LANE - GRIDS);
        *self = WholeLanes::new();
    }
}
