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

/// Division of many numbers by the same divisor.
pub trait Divide: Sized {
    /// Prepares the divisor `d` for `div_by`.
    fn divisor(d: Self) -> f64;
    /// Returns `self / d` rounded to nearest even: the bits of a division, unless the quotient is subnormal.
    fn div_by(self, divisor: f64) -> Self;
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

// The divider is the bottleneck of an update, so f32 multiplies by the inverse in f64. Both roundings together are off by
// less than 2^-51 of the quotient. A quotient of 24-bit numbers that is not itself an f32 number is further than that
// from every midpoint between two: |A / B - M / 2| >= 1 / 2B for integers A, B < 2^24 and odd M, 2^-49 of the quotient
// or more. So rounding to f32 gives what the division gives; zeros, infinities and NaN are multiplied as divided.
impl Divide for f32 {
    fn divisor(d: f32) -> f64 {
        1.0 / f64::from(d)
    }
    #[inline(always)]
    fn div_by(self, inverse: f64) -> f32 {
        (f64::from(self) * inverse) as f32
    }
}

impl Divide for f64 {
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

    fn same(fast: f32, plain: f32) -> bool {
        fast.to_bits() == plain.to_bits() || fast.is_nan() && plain.is_nan()
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
            // Divisors as in bias corrections, dividends as in square roots; significands of all ones are the hardest case.
            let b = f32::from_bits(0x3280_0000 + random() % 0x0d00_0001) * 1.0;
            let a = f32::from_bits(0x1a00_0000 + random() % 0x4600_0000);
            let b = if random() % 8 == 0 { f32::from_bits(b.to_bits() | 0x007f_ffff) } else { b };
            assert_eq!(a.div_by(f32::divisor(b)).to_bits(), (a / b).to_bits(), "{a:e} / {b:e}");
        }
        for a in [0.0, -0.0, f32::INFINITY, f32::NAN] {
            assert!(same(a.div_by(f32::divisor(0.3)), a / 0.3));
        }
    }
}
