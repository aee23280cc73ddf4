//! The arithmetic of reductions, element by element: what is accumulated in which type, and the one rounding at the end.

use crate::Reduction;
use meshstep_tensor::{Element, bf16, f16, narrow};

/// Bytes of each buffer that are reduced at a time. Few, so that all buffers are read side by side: a page at a time of
/// each is half as fast, because the processor fetches ahead only within pages it is reading.
const BLOCK_BYTES: usize = 256;
/// The most elements that are reduced at a time.
pub(crate) const BLOCK: usize = BLOCK_BYTES / 2;

/// Elements of `T` that are reduced at a time.
pub(crate) const fn block<T: Wire>() -> usize {
    BLOCK_BYTES / size_of::<T>()
}

/// An element type and what it is accumulated in.
pub(crate) trait Wire: Element {
    type Wide: Accumulator;
    fn widen(self) -> Self::Wide;
    /// To nearest, ties to even.
    fn narrow(wide: Self::Wide) -> Self;
}

/// What sums are kept in.
pub(crate) trait Accumulator: Copy {
    const ZERO: Self;
    fn plus(self, other: Self) -> Self;
    fn times(self, factor: f64) -> Self;
    /// With `other` times `factor` added.
    #[inline(always)]
    fn plus_times(self, other: Self, factor: f64) -> Self {
        self.plus(other.times(factor))
    }
    /// The larger; NaN if either is; `self` if they are equal.
    fn max(self, other: Self) -> Self;
    /// The smaller; NaN if either is; `self` if they are equal.
    fn min(self, other: Self) -> Self;
    /// Multiplies by 1/n where that is exact, which is then the same as to divide.
    fn over(self, divisor: Divisor<Self>) -> Self;
    fn from_count(n: usize) -> Self;
    fn reciprocal(self) -> Self;
}

/// How to divide by the number of ranks: by a multiplication where the reciprocal is exact, much the faster.
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

/// The accumulators begin with the first rank's values, not with zero, which would lose the sign of `-0.0`.
#[inline(always)]
pub(crate) fn first<T: Wire>(sum: &mut [T::Wide], values: &[T]) {
    for (s, &x) in sum.iter_mut().zip(values) {
        *s = x.widen();
    }
}

/// The same with the rank's factor.
#[inline(always)]
pub(crate) fn first_times<T: Wire>(sum: &mut [T::Wide], values: &[T], factor: f64) {
    each(sum, values, |_, x: T| x.widen().times(factor));
}

/// Takes in another rank's values.
#[inline(always)]
pub(crate) fn next<T: Wire>(sum: &mut [T::Wide], values: &[T], reduction: Reduction) {
    match reduction {
        Reduction::Sum | Reduction::Mean | Reduction::PreMulSum { .. } => {
            each(sum, values, |s, x: T| s.plus(x.widen()));
        }
        Reduction::Max => each(sum, values, |s, x: T| s.max(x.widen())),
        Reduction::Min => each(sum, values, |s, x: T| s.min(x.widen())),
    }
}

/// Takes in another rank's values, times its factor.
#[inline(always)]
pub(crate) fn next_times<T: Wire>(sum: &mut [T::Wide], values: &[T], factor: f64) {
    each(sum, values, |s, x: T| s.plus_times(x.widen(), factor));
}

/// Divides for a mean over `n` ranks, and rounds.
#[inline(always)]
pub(crate) fn last<T: Wire>(rounded: &mut [T], sum: &[T::Wide], reduction: Reduction, n: usize) {
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

#[inline(always)]
fn each<T: Wire>(sum: &mut [T::Wide], values: &[T], take: impl Fn(T::Wide, T) -> T::Wide) {
    for (s, &x) in sum.iter_mut().zip(values) {
        *s = take(*s, x);
    }
}

#[inline(always)]
fn round<T: Wire>(rounded: &mut [T], sum: &[T::Wide], round: impl Fn(T::Wide) -> T) {
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

/// A sum of f64 and what its additions have rounded off (Knuth's two-sum), so that the mean of equal numbers is that number.
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

    /// Where nothing was rounded off the sum stays as it is, `-0.0` and infinities included.
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
    /// The product, and what it has rounded off.
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
    /// The quotient, and what the division left over: `n * x` gives `x`, exactly.
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
    /// Never asked for, as `over`: `Op::check` refuses what divides or multiplies integers.
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
    ($t:ty, $wide:ty, $widen:expr, $narrow:expr) => {
        impl Wire for $t {
            type Wide = $wide;
            #[inline(always)]
            fn widen(self) -> $wide {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(wide: $wide) -> Self {
                $narrow(wide)
            }
        }
    };
}
wire!(f32, f64, f64::from, |wide| wide as f32);
wire!(f64, Twofold, Twofold::new, Twofold::rounded);
wire!(u64, u64, |x| x, |wide| wide);
wire!(bf16, f32, narrow::from_bf16, narrow::to_bf16);
wire!(f16, f32, narrow::from_f16, narrow::to_f16);
