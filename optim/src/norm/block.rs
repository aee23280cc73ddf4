//! A block of a norm at a time, exactly, in vector registers.
//!
//! Let every term be at most `2^b` and the block have `N = 2^10` terms. Adding and taking off `M = 1.5 * 2^(b + 9)`, whose
//! last place is the grid `2^(b - 43)`, rounds a term `y` to the grid: `q = (y + M) - M`. No sum rounds but that one:
//!
//! - `|y| <= 2^b <= 2^(b + 8)`, so `y + M` stays between `2^(b + 9)` and `2^(b + 10)`, where the spacing is the grid, and
//!   taking off `M` leaves a multiple of the grid that is at most `2^b`: fewer than 53 bits.
//! - `r = y - q` is a multiple of `y`'s last place and no larger than `|y|`, as rounding to the grid leaves either all of
//!   `y` (`q = 0`) or at most half the grid, which `|y|` then exceeds: it fits `y`'s 53 bits.
//! - any partial sum of the `q` is a multiple of the grid and at most `N * 2^b = 2^53` grids: it fits 53 bits.
//!
//! What is left of each term is at most half a grid, so the same again with `b - 44` takes the next 44 bits, and two
//! levels are nearly always enough for f32: a square has bits left only if it is below `2^-40` of the largest one's
//! bound. Whether any has is known from the bits of what remains; then further levels follow until nothing remains. The
//! few exact level sums are deposited in the integer accumulator, so it does not matter where blocks begin.

use super::{ExactSum, Norm, NormAccumulator, Stored};
use crate::fetch::fetch;
use meshstep_tensor::simd::Body;
use meshstep_tensor::{Element, bf16, f16};

/// Elements of a block: `2^LOG`.
pub(super) const LEN: usize = 1 << LOG;
const LOG: i32 = 10;

/// Bits of a term that one level takes.
const TAKEN: i32 = 54 - LOG;

/// Partial sums side by side: two 512-bit registers of f64.
const LANES: usize = 16;

/// Bits of an infinite f64: finite magnitudes are below.
pub(super) const INFINITE: u64 = 0x7ff << 52;

/// What norms are taken of.
pub(super) trait Source: Element {
    /// What terms are computed from.
    type Wide: Wide;
    /// The same number, in a form that vectorises.
    fn wide(self) -> Self::Wide;
    /// The same number as f64, obviously.
    fn exactly(self) -> f64;
}

macro_rules! source {
    ($t:ty, $wide:ty) => {
        impl Source for $t {
            type Wide = $wide;

            #[inline(always)]
            fn wide(self) -> $wide {
                Stored::<$wide>::widen(self)
            }
            fn exactly(self) -> f64 {
                Stored::<$wide>::widen_plainly(self).into()
            }
        }
    };
}
source!(f32, f32);
source!(f64, f64);
source!(bf16, f32);
source!(f16, f32);

/// What terms are computed from: f32, whose squares are f64 numbers, or f64, whose squares are sums of two.
pub(super) trait Wide: Copy {
    const ZERO: Self;
    /// Bits of the largest magnitude as f64; those of infinity or more if one is not finite.
    fn peak(block: &[Self]) -> u64;
    fn is_finite(self) -> bool;
    fn magnitude(self) -> f64;
    /// Adds the squares of a block whose magnitudes are below `2^(exponent + 1)`.
    fn add_squares(block: &[Self], exponent: i32, sum: &mut ExactSum);
}

impl Wide for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn peak(block: &[f32]) -> u64 {
        let largest = block.iter().fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7fff_ffff));
        f64::from(f32::from_bits(largest)).to_bits()
    }
    #[inline(always)]
    fn is_finite(self) -> bool {
        self.is_finite()
    }
    #[inline(always)]
    fn magnitude(self) -> f64 {
        self.abs().into()
    }
    #[inline(always)]
    fn add_squares(block: &[f32], exponent: i32, sum: &mut ExactSum) {
        add_terms(block, |x| f64::from(x) * f64::from(x), 2 * exponent + 2, sum);
    }
}

impl Wide for f64 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn peak(block: &[f64]) -> u64 {
        block.iter().fold(0, |largest, x| largest.max(x.abs().to_bits()))
    }
    #[inline(always)]
    fn is_finite(self) -> bool {
        self.is_finite()
    }
    #[inline(always)]
    fn magnitude(self) -> f64 {
        self.abs()
    }
    /// A square is its rounding and what a fused multiply-subtract says was lost, both f64 numbers as long as the square
    /// neither overflows nor has bits below `2^-1074`: from `2^-480` to `2^500`, half the last place of the smallest
    /// square is `2^-1013`, and what was lost is a multiple of `2^(2 * (-480 - 52)) = 2^-1064`.
    #[inline(always)]
    fn add_squares(block: &[f64], exponent: i32, sum: &mut ExactSum) {
        // Zero becomes the largest and does not count.
        let smallest = block.iter().fold(u64::MAX, |least, x| least.min(x.abs().to_bits().wrapping_sub(1)));
        if exponent >= 500 || smallest < 2f64.powi(-480).to_bits() {
            return block.iter().for_each(|&x| sum.add_square(x));
        }
        let bound = 2 * exponent + 2;
        add_terms(block, |x| x * x, bound, sum);
        add_terms(block, |x| x.mul_add(x, -(x * x)), bound - 53, sum);
    }
}

/// All of `values`, block by block.
pub(super) struct Blocks<'a, X> {
    pub(super) values: &'a [X],
    pub(super) into: &'a mut NormAccumulator,
}

impl<X: Source> Body for Blocks<'_, X> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut room = [X::Wide::ZERO; LEN];
        for values in self.values.chunks(LEN) {
            let block = &mut room[..values.len()];
            fetch(values.as_ptr().wrapping_add(LEN), LEN);
            block.iter_mut().zip(values).for_each(|(wide, x)| *wide = x.wide());
            add_block(block, self.into);
        }
    }
}

#[inline(always)]
fn add_block<W: Wide>(block: &mut [W], into: &mut NormAccumulator) {
    let mut peak = W::peak(block);
    if peak >= INFINITE {
        into.non_finite += leave_out(block);
        peak = W::peak(block);
    }
    into.max_bits = into.max_bits.max(peak);
    if peak == 0 || into.norm == Norm::Inf {
        return;
    }
    // Of a subnormal peak this is more than its exponent, which bounds it too.
    let exponent = (peak >> 52) as i32 - 1023;
    match into.norm {
        Norm::L1 => add_terms(block, W::magnitude, exponent + 1, &mut into.sum),
        _ => W::add_squares(block, exponent, &mut into.sum),
    }
}

/// Sets what is not finite to zero; how many there were.
fn leave_out<W: Wide>(block: &mut [W]) -> u64 {
    let mut count = 0;
    for x in block.iter_mut().filter(|x| !x.is_finite()) {
        *x = W::ZERO;
        count += 1;
    }
    count
}

/// The constant that rounds terms up to `2^bound` to the grid of their level.
#[inline(always)]
fn magic(bound: i32) -> f64 {
    // 1.5 * 2^(bound + LOG - 1), written as bits.
    f64::from_bits(((bound + LOG - 1 + 1023) as u64) << 52 | 1 << 51)
}

/// Whether a level for terms up to `2^bound` has a finite constant and a grid that f64 can hold.
#[inline(always)]
fn in_range(bound: i32) -> bool {
    bound + LOG - 1 < 1023 && bound + LOG - 53 >= -1074
}

/// The part of `y` on the grid of `magic`, and the rest.
#[inline(always)]
fn cut(y: f64, magic: f64) -> (f64, f64) {
    let q = (y + magic) - magic;
    (q, y - q)
}

/// Adds `term(x)` for each element, none of which exceeds `2^bound` in magnitude.
#[inline(always)]
pub(super) fn add_terms<W: Wide>(block: &[W], term: impl Fn(W) -> f64, bound: i32, sum: &mut ExactSum) {
    if !in_range(bound) || !in_range(bound - TAKEN) {
        return block.iter().for_each(|&x| sum.add(term(x)));
    }
    let (high, low) = (magic(bound), magic(bound - TAKEN));
    let mut lanes = Lanes { high: [0.0; LANES], low: [0.0; LANES], rest: [0; LANES] };
    let (chunks, tail) = block.as_chunks::<LANES>();
    for chunk in chunks {
        lanes.add(chunk, &term, high, low);
    }
    let mut last = [W::ZERO; LANES];
    last[..tail.len()].copy_from_slice(tail);
    lanes.add(&last, &term, high, low);
    sum.add(lanes.high.iter().sum());
    sum.add(lanes.low.iter().sum());
    if lanes.rest.iter().any(|&bits| bits != 0) {
        let mut rest = [0.0; LEN];
        let rest = &mut rest[..block.len()];
        rest.iter_mut().zip(block).for_each(|(r, &x)| *r = cut(cut(term(x), high).1, low).1);
        add_rest(rest, bound - 2 * TAKEN, sum);
    }
}

/// Sums of two levels, and the bits of whatever remains.
struct Lanes {
    high: [f64; LANES],
    low: [f64; LANES],
    rest: [u64; LANES],
}

impl Lanes {
    #[inline(always)]
    fn add<W: Wide>(&mut self, chunk: &[W; LANES], term: &impl Fn(W) -> f64, high: f64, low: f64) {
        for (lane, &x) in chunk.iter().enumerate() {
            let (first, rest) = cut(term(x), high);
            let (second, rest) = cut(rest, low);
            self.high[lane] += first;
            self.low[lane] += second;
            // Equal numbers differ by +0, whose bits are all clear.
            self.rest[lane] |= rest.to_bits();
        }
    }
}

/// Further levels, until nothing remains or the grid would leave f64's range.
#[inline(always)]
fn add_rest(rest: &mut [f64], mut bound: i32, sum: &mut ExactSum) {
    while in_range(bound) {
        let magic = magic(bound);
        let mut left = 0;
        let mut level = [0.0; LANES];
        for chunk in rest.chunks_mut(LANES) {
            for (r, lane) in chunk.iter_mut().zip(&mut level) {
                let (q, after) = cut(*r, magic);
                *lane += q;
                *r = after;
                left |= after.to_bits();
            }
        }
        sum.add(level.iter().sum());
        if left == 0 {
            return;
        }
        bound -= TAKEN;
    }
    rest.iter().for_each(|&r| sum.add(r));
}
