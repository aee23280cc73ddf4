//! Number types of a rule's computation, and element types in memory.
//!
//! Conversions exist twice: `tensor`'s, which vectorise, and the `half` crate's, which the reference uses.

use meshstep_tensor::{Element, bf16, f16, narrow};
use std::ops::{Add, Div, Mul, Sub};

/// Type of a rule's computation: f32, or f64 throughout. The trait is sealed.
pub trait Real:
    Element
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Divide
{
    /// Description of the type's values, for errors about values outside them.
    const FITS: &'static str;

    /// Converts, rounding to nearest even.
    fn from_f64(x: f64) -> Self;
    /// Converts exactly.
    fn from_f32(x: f32) -> Self;
    /// Converts, rounding to nearest even.
    fn to_f32(self) -> f32;
    /// Returns true if the number is neither infinite nor NaN.
    fn finite(self) -> bool;
    /// Returns `self * a + b`, rounded once.
    fn fma(self, a: Self, b: Self) -> Self;
    /// Returns the square root, rounded to nearest even.
    fn root(self) -> Self;
}

/// Division of many numbers by the same divisor, which is normal, at most 1, and at least 2^-64.
pub trait Divide: Sized {
    /// The divisor, prepared.
    type Divisor: Copy + Send + Sync;
    /// Prepares the divisor `d` for `div_by`.
    fn divisor(d: Self) -> Self::Divisor;
    /// Returns `self / d` rounded to nearest even: the bits of a division. `self` is the square root of a number, an infinity or NaN.
    fn div_by(self, divisor: Self::Divisor) -> Self;
}

macro_rules! real {
    ($t:ident, $fits:literal) => {
        impl Real for $t {
            const FITS: &'static str = $fits;

            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                x.into()
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                self as f32
            }
            #[inline(always)]
            fn finite(self) -> bool {
                self.is_finite()
            }
            #[inline(always)]
            fn fma(self, a: Self, b: Self) -> Self {
                self.mul_add(a, b)
            }
            #[inline(always)]
            fn root(self) -> Self {
                self.sqrt()
            }
        }
    };
}

real!(f32, "a finite number that f32 can hold");
real!(f64, "a finite number");

/// Divisor `d` of f32 numbers, with its inverse rounded to f32.
#[derive(Clone, Copy, Debug)]
pub struct Inverse {
    d: f32,
    inverse: f32,
}

// The divider is the bottleneck of an update, so f32 multiplies by the inverse and corrects the product once (Markstein, *Computation
// of elementary functions on the IBM RISC System/6000 processor*, 1990). The product is off by at most 2^-23 of the quotient, and the sum
// before the last rounding by less than 2^-45 of it, the rounding of the remainder `q * d - x` included. So the last rounding can differ
// from the division's only if the quotient is that close to the midpoint between two f32 numbers: for significands X and D and the odd
// integer M of the midpoint, |2^s X - M D| <= 8, where s is 24 or 25. The test tries all such X for every D.
impl Divide for f32 {
    type Divisor = Inverse;

    fn divisor(d: f32) -> Inverse {
        Inverse { d, inverse: 1.0 / d }
    }
    #[inline(always)]
    fn div_by(self, Inverse { d, inverse }: Inverse) -> f32 {
        let q = self * inverse;
        let over = q.mul_add(d, -self);
        // NaN if the quotient is infinite, which any finite correction leaves as it is. Then a NaN quotient stays one too.
        let over = if over < f32::MAX { over } else { f32::MAX };
        over.mul_add(-inverse, q)
    }
}

impl Divide for f64 {
    type Divisor = f64;

    fn divisor(d: f64) -> f64 {
        d
    }
    #[inline(always)]
    fn div_by(self, d: f64) -> f64 {
        self / d
    }
}

/// Element in memory that a rule reads as `T`.
pub(crate) trait Stored<T: Real>: Element {
    /// Returns the same number as `T`, in a form that vectorises.
    fn widen(self) -> T;
    /// Returns the same number as `T`, by the obvious way.
    fn widen_plainly(self) -> T;
    /// Returns the nearest number of this type, ties to even, in a form that vectorises. NaN stays NaN.
    fn narrow(x: T) -> Self;
    /// Returns the nearest number of this type, ties to even, by the obvious way. NaN stays NaN.
    fn narrow_plainly(x: T) -> Self;
}

macro_rules! as_is {
    ($t:ident) => {
        impl Stored<$t> for $t {
            #[inline(always)]
            fn widen(self) -> $t {
                self
            }
            fn widen_plainly(self) -> $t {
                self
            }
            #[inline(always)]
            fn narrow(x: $t) -> Self {
                x
            }
            fn narrow_plainly(x: $t) -> Self {
                x
            }
        }
    };
}
as_is!(f32);
as_is!(f64);

macro_rules! sixteen_bits {
    ($t:ident, $widen:ident, $narrow:ident) => {
        impl Stored<f32> for $t {
            #[inline(always)]
            fn widen(self) -> f32 {
                narrow::$widen(self)
            }
            fn widen_plainly(self) -> f32 {
                self.to_f32()
            }
            #[inline(always)]
            fn narrow(x: f32) -> Self {
                narrow::$narrow(x)
            }
            fn narrow_plainly(x: f32) -> Self {
                $t::from_f32(x)
            }
        }
    };
}
sixteen_bits!(bf16, from_bf16, to_bf16);
sixteen_bits!(f16, from_f16, to_f16);

/// Returns `base^n` by repeated squaring with plain multiplications, so that it rounds the same everywhere.
pub fn power(base: f64, n: u64) -> f64 {
    let (mut result, mut square, mut left) = (1.0, base, n);
    while left > 0 {
        if left & 1 == 1 {
            result *= square;
        }
        square *= square;
        left >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(a: f32, b: f32) {
        let (fast, plain) = (a.div_by(f32::divisor(b)), a / b);
        assert!(
            fast.to_bits() == plain.to_bits() || fast.is_nan() && plain.is_nan(),
            "{a:e} / {b:e}: {fast:e}"
        );
    }

    /// The hardest dividends for a divisor of significand `d`: all X in [2^23, 2^24) with `2^s X = M d + c`, M odd.
    fn hardest(d: u64) -> impl Iterator<Item = u64> {
        let (zeros, odd) = (d.trailing_zeros(), d >> d.trailing_zeros());
        // Newton's iteration for the inverse of an odd number modulo 2^64.
        let inverse = (0..6).fold(odd, |x, _| x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x))));
        (-8..=8i64).filter(move |c| c.trailing_zeros() == zeros).flat_map(move |c| {
            let least = ((-c >> zeros) as u64).wrapping_mul(inverse);
            [24, 25].into_iter().flat_map(move |s| {
                // M modulo 2^(s - zeros); M has 25 bits.
                let modulus = 1u64 << (s - zeros);
                let least = least & (modulus - 1);
                let first = least + (1u64 << 24).saturating_sub(least).div_ceil(modulus) * modulus;
                let dividend = move |m: u64| (m as i64 * d as i64 + c) as u64 >> s;
                (first..1 << 25).step_by(modulus as usize).map(dividend).filter(|x| x >> 23 == 1)
            })
        })
    }

    #[test]
    fn dividing_by_any_significand_is_dividing() {
        let mut tried = 0u64;
        for d in 1 << 23..1 << 24 {
            for x in hardest(d) {
                check(x as f32, d as f32 * 0.5f32.powi(24));
                tried += 1;
            }
        }
        assert!(tried > 2 << 23, "{tried}");
    }

    #[test]
    fn dividing_by_a_divisor_is_dividing() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32
        };
        let rounds = meshstep_cases::cases(1 << 20, 1 << 26);
        for _ in 0..rounds {
            // Divisors as in bias corrections, dividends as in square roots.
            let b = f32::from_bits(0x3280_0000 + random() % 0x0d00_0001);
            let a = f32::from_bits(0x1a00_0000 + random() % 0x4600_0000);
            check(a, b);
        }
        let roots = [0, 1, 0x007f_ffff, 0x0080_0000, 0x7f7f_ffff].map(|bits| f32::from_bits(bits).sqrt());
        for b in [2f32.powi(-64), 3e-8, 0.3, 1.0 - f32::EPSILON / 2.0, 1.0] {
            [0.0, -0.0, f32::INFINITY, f32::NAN].iter().chain(&roots).for_each(|&a| check(a, b));
        }
    }
}
