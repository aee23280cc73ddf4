//! Arithmetic of reductions, element by element: the accumulator type of each element type, and the single rounding at the end.

mod pairwise;

use crate::Reduction;
use meshstep_tensor::{Element, bf16, f16, narrow};

/// Bytes of each buffer per block. The block is small so that all buffers are read side by side: reading a page of each at a time
/// is half as fast, because the hardware prefetches only within pages that are being read.
const BLOCK_BYTES: usize = 256;
/// Largest number of elements of a block.
pub(crate) const BLOCK: usize = BLOCK_BYTES / 2;

/// Returns the number of elements of `T` in a block.
pub(crate) const fn block<T: WireElement>() -> usize {
    BLOCK_BYTES / size_of::<T>()
}

/// Element type with its accumulator type.
pub(crate) trait WireElement: Element {
    type Wide: Accumulator;
    fn widen(self) -> Self::Wide;
    /// Rounds to nearest, ties to even.
    fn narrow(wide: Self::Wide) -> Self;
    /// Returns true if the element is neither infinite nor NaN.
    fn finite(self) -> bool;
}

/// Accumulator of a reduction.
pub(crate) trait Accumulator: Copy {
    const ZERO: Self;
    fn plus(self, other: Self) -> Self;
    fn times(self, factor: f64) -> Self;
    /// Adds `other` times `factor`.
    #[inline(always)]
    fn plus_times(self, other: Self, factor: f64) -> Self {
        self.plus(other.times(factor))
    }
    /// Returns the larger; NaN if either is NaN; `self` if they are equal.
    fn max(self, other: Self) -> Self;
    /// Returns the smaller; NaN if either is NaN; `self` if they are equal.
    fn min(self, other: Self) -> Self;
    /// Divides by `n`; multiplies by 1/n if 1/n is exact, with the same result.
    fn over(self, divisor: Divisor<Self>) -> Self;
    fn from_count(n: usize) -> Self;
    fn reciprocal(self) -> Self;
}

/// Division by the number of ranks: a multiplication if the reciprocal is exact, which is much faster.
#[derive(Clone, Copy)]
pub(crate) enum Divisor<A> {
    Divide(A),
    Multiply(A),
}

impl<A: Accumulator> Divisor<A> {
    fn of(n: usize) -> Self {
        let count = A::from_count(n);
        if n.is_power_of_two() { Divisor::Multiply(count.reciprocal()) } else { Divisor::Divide(count) }
    }
}

/// Values that the ranks contribute to one block of a reduction.
pub(crate) trait Contributions<T> {
    /// Returns the block's values of rank `rank`.
    fn values(&mut self, rank: usize) -> impl Iterator<Item = T>;

    /// Returns the factor of rank `rank`'s values.
    fn factor(&self, rank: usize) -> f64;
}

/// Reduces one block of the values of `n` ranks into `rounded`: the order of every reduction on CPUs. The accumulator begins with
/// rank 0's values, takes those of the next ranks one after the other, and is rounded once. `TIMES` adds a factor for each rank.
#[inline(always)]
pub(crate) fn fold_block<T: WireElement, const TIMES: bool>(
    from: &mut impl Contributions<T>,
    (sum, rounded): (&mut [T::Wide], &mut [T]),
    (reduction, n): (Reduction, usize),
) {
    if reduction == Reduction::Pairwise {
        return pairwise::fold_block(from, rounded, n);
    }
    if TIMES {
        let factor = from.factor(0);
        first_times(sum, from.values(0), factor);
    } else {
        first(sum, from.values(0));
    }
    for rank in 1..n {
        if TIMES {
            let factor = from.factor(rank);
            next_times(sum, from.values(rank), factor);
        } else {
            next(sum, from.values(rank), reduction);
        }
    }
    last(rounded, sum, reduction, n);
}

/// Initialises the accumulators with the first rank's values. Starting at zero would lose the sign of `-0.0`.
#[inline(always)]
fn first<T: WireElement>(sum: &mut [T::Wide], values: impl Iterator<Item = T>) {
    each(sum, values, |_, x| x.widen());
}

/// Like [`first`], times the rank's factor.
#[inline(always)]
fn first_times<T: WireElement>(sum: &mut [T::Wide], values: impl Iterator<Item = T>, factor: f64) {
    each(sum, values, |_, x: T| x.widen().times(factor));
}

/// Accumulates another rank's values.
#[inline(always)]
fn next<T: WireElement>(sum: &mut [T::Wide], values: impl Iterator<Item = T>, reduction: Reduction) {
    match reduction {
        Reduction::Sum | Reduction::Mean | Reduction::Pairwise | Reduction::PreMulSum { .. } => {
            each(sum, values, |s, x: T| s.plus(x.widen()));
        }
        // The caller has taken the reduction of the block's elements, which is none by the elements' places.
        Reduction::Max | Reduction::SumThenMax { .. } => each(sum, values, |s, x: T| s.max(x.widen())),
        Reduction::Min => each(sum, values, |s, x: T| s.min(x.widen())),
    }
}

/// Accumulates another rank's values times its factor.
#[inline(always)]
fn next_times<T: WireElement>(sum: &mut [T::Wide], values: impl Iterator<Item = T>, factor: f64) {
    each(sum, values, |s, x: T| s.plus_times(x.widen(), factor));
}

/// Divides by `n` for a mean, and rounds.
#[inline(always)]
fn last<T: WireElement>(rounded: &mut [T], sum: &[T::Wide], reduction: Reduction, n: usize) {
    match (reduction, Divisor::<T::Wide>::of(n)) {
        (Reduction::Mean, Divisor::Divide(count)) => {
            round(rounded, sum, |s| T::narrow(s.over(Divisor::Divide(count))))
        }
        (Reduction::Mean, Divisor::Multiply(part)) => {
            round(rounded, sum, |s| T::narrow(s.over(Divisor::Multiply(part))))
        }
        _ => round(rounded, sum, |s| T::narrow(s)),
    }
}

/// Counts the elements that are infinite or NaN.
#[inline(always)]
pub(crate) fn non_finite<T: WireElement>(values: &[T]) -> u64 {
    values.iter().map(|x| u32::from(!x.finite())).sum::<u32>().into()
}

#[inline(always)]
fn each<T: WireElement>(
    sum: &mut [T::Wide],
    values: impl Iterator<Item = T>,
    take: impl Fn(T::Wide, T) -> T::Wide,
) {
    for (s, x) in sum.iter_mut().zip(values) {
        *s = take(*s, x);
    }
}

#[inline(always)]
fn round<T: WireElement>(rounded: &mut [T], sum: &[T::Wide], round: impl Fn(T::Wide) -> T) {
    for (r, &s) in rounded.iter_mut().zip(sum) {
        *r = round(s);
    }
}

macro_rules! float_accumulator {
    ($t:ty) => {
        impl Accumulator for $t {
            const ZERO: Self = 0.0;
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn times(self, factor: f64) -> Self {
                self * factor as $t
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if other > self || other.is_nan() { other } else { self }
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                if other < self || other.is_nan() { other } else { self }
            }
            #[inline(always)]
            fn over(self, divisor: Divisor<Self>) -> Self {
                match divisor {
                    Divisor::Divide(n) => self / n,
                    Divisor::Multiply(part) => self * part,
                }
            }
            fn from_count(n: usize) -> Self {
                n as $t
            }
            fn reciprocal(self) -> Self {
                1.0 / self
            }
        }
    };
}
float_accumulator!(f32);
float_accumulator!(f64);

/// Sum of f64 values and its rounding errors (Knuth's two-sum), so that the mean of equal numbers is that number.
#[derive(Clone, Copy)]
pub(crate) struct Twofold {
    high: f64,
    low: f64,
}

impl Twofold {
    #[inline(always)]
    fn new(high: f64) -> Self {
        Twofold { high, low: 0.0 }
    }

    /// Returns the rounded sum. A sum without rounding errors stays unchanged, including `-0.0` and infinities.
    #[inline(always)]
    fn rounded(self) -> f64 {
        if self.low != 0.0 && self.high.is_finite() { self.high + self.low } else { self.high }
    }
}

impl Accumulator for Twofold {
    const ZERO: Self = Twofold { high: 0.0, low: 0.0 };
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        let high = self.high + other.high;
        let theirs = high - self.high;
        let lost = (self.high - (high - theirs)) + (other.high - theirs);
        Twofold { high, low: self.low + lost }
    }
    /// Returns the product and its rounding error.
    #[inline(always)]
    fn times(self, factor: f64) -> Self {
        let high = self.high * factor;
        Twofold { high, low: self.high.mul_add(factor, -high) }
    }
    #[inline(always)]
    fn plus_times(self, other: Self, factor: f64) -> Self {
        let product = other.times(factor);
        let sum = self.plus(product);
        Twofold { low: sum.low + product.low, ..sum }
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Twofold::new(Accumulator::max(self.high, other.high))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Twofold::new(Accumulator::min(self.high, other.high))
    }
    /// Returns the quotient and the remainder's share: `n * x` gives `x`, exactly.
    #[inline(always)]
    fn over(self, divisor: Divisor<Self>) -> Self {
        match divisor {
            Divisor::Divide(n) => {
                let high = self.high / n.high;
                let rest = (-high).mul_add(n.high, self.high) + self.low;
                Twofold { high, low: rest / n.high }
            }
            Divisor::Multiply(part) => Twofold { high: self.high * part.high, low: self.low * part.high },
        }
    }
    fn from_count(n: usize) -> Self {
        Twofold::new(n as f64)
    }
    fn reciprocal(self) -> Self {
        Twofold::new(1.0 / self.high)
    }
}

impl Accumulator for u64 {
    const ZERO: Self = 0;
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Ord::max(self, other)
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Ord::min(self, other)
    }
    /// Unreachable, like `over`: `Op::check` refuses division and factors of integers.
    fn times(self, _: f64) -> Self {
        self
    }
    fn over(self, _: Divisor<Self>) -> Self {
        self
    }
    fn from_count(n: usize) -> Self {
        n as u64
    }
    fn reciprocal(self) -> Self {
        self
    }
}

macro_rules! wire {
    ($t:ty, $wide:ty, $widen:expr, $narrow:expr, $finite:expr) => {
        impl WireElement for $t {
            type Wide = $wide;
            #[inline(always)]
            fn widen(self) -> $wide {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(wide: $wide) -> Self {
                $narrow(wide)
            }
            #[inline(always)]
            fn finite(self) -> bool {
                $finite(self)
            }
        }
    };
}
wire!(f32, f64, f64::from, |wide| wide as f32, f32::is_finite);
wire!(f64, Twofold, Twofold::new, Twofold::rounded, f64::is_finite);
wire!(u64, u64, |x| x, |wide| wide, |_| true);
wire!(bf16, f32, narrow::from_bf16, narrow::to_bf16, |x: bf16| x.to_bits() & 0x7f80 != 0x7f80);
wire!(f16, f32, narrow::from_f16, narrow::to_f16, |x: f16| x.to_bits() & 0x7c00 != 0x7c00);
