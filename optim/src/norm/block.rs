//! Exact sums of norms and dot products, one block at a time, in vector registers.
//!
//! Let every term be at most `2^b`. Let `M = 1.5 * 2^(b + 1)`, with the grid `2^(b - 51)` as its last place. Adding `M` rounds a term `y`
//! to the grid, `y + M = q + M`, and no other sum rounds:
//!
//! - `q` is at most `2^b`, 51 bits of grids, so `q + M` stays from `2^(b + 1)` to `2^(b + 2)`, where the spacing is the grid
//!   and consecutive numbers have consecutive bits: `bits(q + M) - bits(M)` is `q` counted in grids. 64-bit integers add
//!   `2^11` of them without overflow.
//! - `r = y - q` is a multiple of `y`'s last place and no larger than `|y|`, as rounding to the grid leaves either all of
//!   `y` (`q = 0`) or at most half the grid, which `|y|` then exceeds: it fits `y`'s 53 bits.
//!
//! The fast way is in lanes.rs. The other way takes each term alone: first its multiple of the grid `2^(b - 51)`. The rest is at most
//! `2^(b - 52)`, so the same step takes the next 52 bits, and further levels follow until nothing remains.
//!
//! Only integers are deposited in the accumulator, so block boundaries do not affect the result.

use super::extent::{Extent, Magnitude};
use super::lanes::{LANES, Lanes};
use super::{ExactSum, Norm, NormAccumulator, Stored};
use meshstep_tensor::simd::Body;
use meshstep_tensor::{Element, bf16, f16};

/// Elements of a block: `2^LOG`.
pub(crate) const LEN: usize = 1 << LOG;
const LOG: i32 = 11;

/// Maximum term of a level in grids: `2^GRIDS`. The next level's terms are at most half a grid.
pub(super) const GRIDS: i32 = 51;
const TAKEN: i32 = GRIDS + 1;
const _: () = assert!(GRIDS + LOG < 63);

/// Bits of an infinite f64: finite magnitudes are below.
pub(super) const INFINITE: u64 = 0x7ff << 52;

/// Element type of norms.
pub(crate) trait Source: Element {
    /// Type from which terms are computed.
    type Wide: Wide;
    /// Returns the same numbers in the wide type, in `room` if they need conversion.
    fn wide<'a>(values: &'a [Self], room: &'a mut [Self::Wide; LEN]) -> &'a [Self::Wide];
    /// Returns the same number as f64, by the obvious way.
    fn exactly(self) -> f64;
}

macro_rules! source {
    ($t:ty, $wide:ty, |$values:ident, $room:ident| $block:expr) => {
        impl Source for $t {
            type Wide = $wide;

            #[inline(always)]
            fn wide<'a>($values: &'a [$t], $room: &'a mut [$wide; LEN]) -> &'a [$wide] {
                $block
            }
            fn exactly(self) -> f64 {
                Stored::<$wide>::widen_plainly(self).into()
            }
        }
    };
}
source!(f32, f32, |values, _room| values);
source!(f64, f64, |values, _room| values);
source!(bf16, f32, |values, room| widen(values, room));
source!(f16, f32, |values, room| widen(values, room));

#[inline(always)]
fn widen<'a, X: Stored<f32>>(values: &[X], room: &'a mut [f32; LEN]) -> &'a [f32] {
    let block = &mut room[..values.len()];
    block.iter_mut().zip(values).for_each(|(wide, x)| *wide = x.widen());
    block
}

/// Type from which terms are computed: f32, for which squares are f64 numbers, or f64, for which squares are sums of two f64 numbers.
pub(crate) trait Wide: Magnitude + Element + Into<f64> {
    const ZERO: Self;
    fn is_finite(self) -> bool;
    fn magnitude(self) -> f64;
    /// Significand bits after the first.
    const FRACTION: i32;
    /// Adds the products of the elements of two blocks, or squares if the blocks are the same.
    fn add_products(blocks: [(&[Self], Exponents); 2], ahead: Ahead, lanes: &mut Lanes, sum: &mut ExactSum);
}

/// Exponents of a block: magnitudes are below `2^(high + 1)` and, except for zeros, at least `2^low`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exponents {
    low: i32,
    high: i32,
}

impl Exponents {
    /// Returns the exponents of an extent; `None` if all numbers are zero or one is not finite.
    #[inline(always)]
    pub(super) fn of<W: Wide>(extent: Extent<W>) -> Option<Self> {
        let (peak, least) = (extent.largest(), extent.least());
        (0 < peak && peak < INFINITE).then(|| Exponents { low: exponent(least), high: exponent(peak) })
    }
}

impl Wide for f32 {
    const ZERO: Self = 0.0;
    const FRACTION: i32 = 23;

    #[inline(always)]
    fn is_finite(self) -> bool {
        self.is_finite()
    }
    #[inline(always)]
    fn magnitude(self) -> f64 {
        self.abs().into()
    }
    #[inline(always)]
    fn add_products(
        [(xs, x), (ys, y)]: [(&[f32], Exponents); 2],
        ahead: Ahead,
        lanes: &mut Lanes,
        sum: &mut ExactSum,
    ) {
        add_terms((xs, ys), product, product_bits(x, y), ahead, (lanes, sum));
    }
}

/// Returns the bit range of products of f32, which are f64 numbers.
#[inline(always)]
pub(super) fn product_bits(x: Exponents, y: Exponents) -> Bits {
    // Subnormal numbers are multiples of the smallest one.
    let last = |of: Exponents| (of.low - f32::FRACTION).max(-149);
    Bits { last: last(x) + last(y), bound: x.high + y.high + 2 }
}

/// Returns the bit range of products of numbers with `fraction` significand bits after the first, all multiples of `2^smallest`.
#[inline(always)]
pub(super) fn rounded_product_bits(x: Exponents, y: Exponents, fraction: i32, smallest: i32) -> Bits {
    let last = |of: Exponents| (of.low - fraction).max(smallest);
    Bits { last: last(x) + last(y), bound: x.high + y.high + 2 }
}

/// Returns the product plus `c`, rounded once.
#[inline(always)]
fn product<X: Wide>(x: X, y: X, c: f64) -> f64 {
    x.into().mul_add(y.into(), c)
}

impl Wide for f64 {
    const ZERO: Self = 0.0;
    const FRACTION: i32 = 52;

    #[inline(always)]
    fn is_finite(self) -> bool {
        self.is_finite()
    }
    #[inline(always)]
    fn magnitude(self) -> f64 {
        self.abs()
    }
    /// A product is its rounding plus the rounding error from a fused multiply-subtract. Both are f64 numbers as long as the product
    /// neither overflows nor has bits below `2^-1074`: from `2^-960` to `2^1000`, half the last place of the smallest is `2^-1013`, and
    /// the error is a multiple of `2^(-960 - 52 - 52) = 2^-1064`.
    #[inline(always)]
    fn add_products(
        [(xs, x), (ys, y)]: [(&[f64], Exponents); 2],
        ahead: Ahead,
        lanes: &mut Lanes,
        sum: &mut ExactSum,
    ) {
        let (low, high) = (x.low + y.low, x.high + y.high);
        // The exponent of a subnormal number does not bound it from below.
        if high >= 1000 || low < -960 || x.low.min(y.low) < -1022 {
            return xs.iter().zip(ys).for_each(|(&x, &y)| sum.add_product(x, y));
        }
        let (bound, last) = (high + 2, low - 2 * Self::FRACTION);
        let (products, lost) =
            (Bits { last: last + Self::FRACTION, bound }, Bits { last, bound: bound - 53 });
        add_terms((xs, ys), |x, y, c| x * y + c, products, ahead, (lanes, sum));
        let mut lanes = Lanes::new();
        let lose = |x: f64, y: f64, c: f64| x.mul_add(y, -(x * y)) + c;
        add_terms((xs, ys), lose, lost, Ahead::NOTHING, (&mut lanes, sum));
        lanes.deposit(sum);
    }
}

/// Adds all of `values`, block by block.
pub(crate) struct Blocks<'a, X> {
    pub(crate) values: &'a [X],
    pub(crate) into: &'a mut NormAccumulator,
}

impl<X: Source> Body for Blocks<'_, X> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut room = [X::Wide::ZERO; LEN];
        let mut adder = Adder::new(self.into);
        for values in self.values.chunks(LEN) {
            let block = X::wide(values, &mut room);
            let ahead = Ahead::block(values.as_ptr().wrapping_add(2 * LEN));
            adder.add(block, Extent::of(block), ahead);
        }
        adder.finish();
    }
}

/// Prefetch of the data needed after this block, issued in small steps between computations: requests issued at once would fill the
/// processor's queue and stall everything else.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    pub(super) next: *const u8,
    /// Bytes for as many elements as there are lanes.
    pub(super) bytes: usize,
}

impl Ahead {
    /// No prefetch.
    pub(crate) const NOTHING: Ahead = Ahead { next: std::ptr::null(), bytes: 0 };

    /// Prefetches as many elements as the block has, from `next` on.
    #[inline(always)]
    pub(crate) fn block<X>(next: *const X) -> Self {
        Ahead { next: next.cast(), bytes: LANES * size_of::<X>() }
    }
}

/// Norm that blocks are added to. [`finish`](Self::finish) deposits the sums that are still in lanes.
pub(crate) struct Adder<'a> {
    into: &'a mut NormAccumulator,
    lanes: Lanes,
}

impl<'a> Adder<'a> {
    #[inline(always)]
    pub(crate) fn new(into: &'a mut NormAccumulator) -> Self {
        Adder { into, lanes: Lanes::new() }
    }

    /// Adds the terms of a block with magnitudes in `extent`.
    #[inline(always)]
    pub(crate) fn add<W: Wide>(&mut self, block: &[W], extent: Extent<W>, ahead: Ahead) {
        let peak = extent.largest();
        if peak >= INFINITE {
            return self.add_finite(block, ahead);
        }
        let into = &mut *self.into;
        into.max_bits = into.max_bits.max(peak);
        let Some(of) = Exponents::of(extent) else { return };
        if into.norm == Norm::Inf {
            return;
        }
        match into.norm {
            Norm::L1 => {
                let bits = Bits { last: of.low - W::FRACTION, bound: of.high + 1 };
                let sum = (&mut self.lanes, &mut into.sum);
                add_terms((block, block), |x, _, c| x.magnitude() + c, bits, ahead, sum);
            }
            _ => W::add_products([(block, of); 2], ahead, &mut self.lanes, &mut into.sum),
        }
    }

    /// Adds a block with its non-finite elements replaced by zeros and counted.
    #[cold]
    fn add_finite<W: Wide>(&mut self, block: &[W], ahead: Ahead) {
        let mut room = [W::ZERO; LEN];
        let finite = &mut room[..block.len()];
        for (to, &x) in finite.iter_mut().zip(block) {
            match x.is_finite() {
                true => *to = x,
                false => self.into.non_finite += 1,
            }
        }
        self.add(finite, Extent::of(finite), ahead);
    }

    #[inline(always)]
    pub(crate) fn finish(mut self) {
        self.lanes.deposit(&mut self.into.sum);
    }
}

/// Returns the constant that rounds terms up to `2^bound` to the grid of their level.
#[inline(always)]
pub(super) fn magic(bound: i32) -> f64 {
    // 1.5 * 2^(bound + 1), written as bits.
    f64::from_bits(((bound + 1 + 1023) as u64) << 52 | 1 << 51)
}

/// Returns true if a level for terms up to `2^bound` has a finite constant and a grid that f64 can hold.
#[inline(always)]
pub(super) fn in_range(bound: i32) -> bool {
    bound + 2 < 1023 && bound - GRIDS >= -1074
}

/// Bit range of the terms of a block: all are multiples of `2^last`, none exceeds `2^bound`.
#[derive(Clone, Copy)]
pub(crate) struct Bits {
    pub(super) last: i32,
    pub(super) bound: i32,
}

/// Returns the `exponent` of a magnitude's bits: the magnitude is at least `2^exponent` and below `2^(exponent + 1)`; a subnormal one is
/// below both.
#[inline(always)]
fn exponent(bits: u64) -> i32 {
    (bits >> 52) as i32 - 1023
}

/// Adds the term of each pair of elements. `term` adds a pair's term to a constant, rounding once.
#[inline(always)]
fn add_terms<X: Copy>(
    (xs, ys): (&[X], &[X]),
    term: impl Fn(X, X, f64) -> f64,
    bits: Bits,
    ahead: Ahead,
    (lanes, sum): (&mut Lanes, &mut ExactSum),
) {
    let Bits { last, bound } = bits;
    if Lanes::hold(bits) {
        lanes.add((xs, ys), term, bits, ahead, sum);
    } else if in_range(bound) && in_range(bound - TAKEN) {
        add_grids((xs, ys), term, Bits { last, bound }, sum);
    } else {
        xs.iter().zip(ys).for_each(|(&x, &y)| sum.add(term(x, y, 0.0)));
    }
}

/// Adds terms of any bit range, level by level, the first two levels in one pass.
#[inline(always)]
fn add_grids<X: Copy>(
    (xs, ys): (&[X], &[X]),
    term: impl Fn(X, X, f64) -> f64,
    Bits { last, bound }: Bits,
    sum: &mut ExactSum,
) {
    let (high, low) = (magic(bound), magic(bound - TAKEN));
    let (mut highs, mut lows) = (0, 0);
    // Integer sums, which the compiler may vectorise.
    for (&x, &y) in xs.iter().zip(ys) {
        let first = term(x, y, high);
        let rest = term(x, y, high - first);
        highs = first.to_bits().wrapping_add(highs);
        lows = (rest + low).to_bits().wrapping_add(lows);
    }
    sum.add_integer(grids(highs, high, xs.len()), bound - GRIDS);
    sum.add_integer(grids(lows, low, xs.len()), bound - TAKEN - GRIDS);
    if last < bound - TAKEN - GRIDS {
        let mut rest = [0.0; LEN];
        let rest = &mut rest[..xs.len()];
        for (r, (&x, &y)) in rest.iter_mut().zip(xs.iter().zip(ys)) {
            let after = term(x, y, high - term(x, y, high));
            *r = after - ((after + low) - low);
        }
        add_rest(rest, bound - 2 * TAKEN, sum);
    }
}

/// Returns the sum of `count` terms in grids, from the sum of the bits of each term plus `magic`.
#[inline(always)]
pub(super) fn grids(bits: u64, magic: f64, count: usize) -> i64 {
    bits.wrapping_sub(magic.to_bits().wrapping_mul(count as u64)) as i64
}

/// Adds further levels until nothing remains or the grid would leave f64's range.
#[inline(always)]
fn add_rest(rest: &mut [f64], mut bound: i32, sum: &mut ExactSum) {
    while in_range(bound) {
        let magic = magic(bound);
        let (mut level, mut left) = (0u64, 0);
        for r in rest.iter_mut() {
            let first = *r + magic;
            level = level.wrapping_add(first.to_bits());
            *r -= first - magic;
            // The difference of equal numbers is +0, with all bits clear.
            left |= r.to_bits();
        }
        sum.add_integer(grids(level, magic, rest.len()), bound - GRIDS);
        if left == 0 {
            return;
        }
        bound -= TAKEN;
    }
    rest.iter().for_each(|&r| sum.add(r));
}
