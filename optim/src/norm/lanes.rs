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
use std::array::from_fn;

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
        add_all(([xs], [ys]), term, [ahead], [[self]]);
    }

    /// Lets the lanes take `terms` more between these bits.
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

/// Adds the terms of each of some vectors with each of others, all of one length, to lanes that have room for them. An
/// element is widened once for all that it meets, and the sums stay in registers meanwhile.
#[inline(always)]
pub(super) fn add_all<X: Copy, const R: usize, const N: usize>(
    (xs, ys): ([&[X]; R], [&[X]; N]),
    term: impl Fn(X, X, f64) -> f64,
    ahead: [Ahead; R],
    lanes: [[&mut Lanes; N]; R],
) {
    let one = |x: X, y: X, sum: &mut f64, rest: &mut f64| {
        let next = term(x, y, *sum);
        *rest += term(x, y, *sum - next);
        *sum = next;
    };
    let (x_parts, y_parts) = (xs.map(<[X]>::as_chunks::<LANES>), ys.map(<[X]>::as_chunks::<LANES>));
    let parts = y_parts[0].0.len();
    let (x_whole, y_whole) =
        (x_parts.map(|(whole, _)| &whole[..parts]), y_parts.map(|(whole, _)| &whole[..parts]));
    let mut sums: [[[f64; LANES]; N]; R] = from_fn(|r| from_fn(|n| lanes[r][n].sums));
    let mut rests: [[[f64; LANES]; N]; R] = from_fn(|r| from_fn(|n| lanes[r][n].rests));
    for part in 0..parts {
        ahead.iter().for_each(|ahead| fetch(ahead.next.wrapping_add(part * ahead.bytes), ahead.bytes));
        for r in 0..R {
            for n in 0..N {
                for lane in 0..LANES {
                    one(
                        x_whole[r][part][lane],
                        y_whole[n][part][lane],
                        &mut sums[r][n][lane],
                        &mut rests[r][n][lane],
                    );
                }
            }
        }
    }
    for (r, lanes) in lanes.into_iter().enumerate() {
        for (n, lanes) in lanes.into_iter().enumerate() {
            (lanes.sums, lanes.rests) = (sums[r][n], rests[r][n]);
            let both = x_parts[r].1.iter().zip(y_parts[n].1);
            both.zip(lanes.sums.iter_mut().zip(&mut lanes.rests))
                .for_each(|((x, y), (sum, rest))| one(*x, *y, sum, rest));
        }
    }
}
