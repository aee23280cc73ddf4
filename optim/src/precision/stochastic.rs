//! Stochastic rounding of f32 to bf16, so that small changes count on average.
//!
//! ```text
//! bits = the upper half of (bits + random)      random of 16 bits: up with probability (lower half) / 2^16
//! ```
//!
//! The expected value is the number itself (Gupta et al., *Deep learning with limited numerical precision*, 2015). bf16 numbers, zeros
//! and infinities stay unchanged, NaN stays some NaN, and finite numbers stay finite: beyond the largest bf16 number, rounding is towards
//! it.

use meshstep_tensor::bf16;

/// Bits of the largest bf16 number: from here on nothing is rounded up.
const LARGEST: u32 = 0x7F7F_0000;

/// Rounds `x` with these random bits, in a form that vectorises.
#[inline(always)]
pub(crate) fn round(x: f32, random: u16) -> bf16 {
    let bits = x.to_bits();
    let random = if bits & 0x7FFF_FFFF >= LARGEST { 0 } else { u32::from(random) };
    let rounded = bits.wrapping_add(random) >> 16;
    bf16::from_bits(if x.is_nan() { rounded | 0x40 } else { rounded } as u16)
}

/// Rounds `x` with these random bits, by the obvious way.
pub(crate) fn round_plainly(x: f32, random: u16) -> bf16 {
    if !x.is_finite() {
        return bf16::from_f32(x);
    }
    let (low, fraction) = ((x.to_bits() >> 16) as u16, x.to_bits() & 0xFFFF);
    let next = bf16::from_bits(low + 1);
    let up = fraction + u32::from(random) >= 1 << 16;
    if up && next.is_finite() { next } else { bf16::from_bits(low) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_agree_and_keep_what_bf16_holds() {
        for high in 0..=u32::from(u16::MAX) {
            for low in [0, 1, 0x7FFF, 0x8000, 0xFFFF] {
                let x = f32::from_bits(high << 16 | low);
                for random in [0, 1, 0x7FFF, 0x8000, 0xFFFF] {
                    let (fast, plain) = (round(x, random), round_plainly(x, random));
                    assert!(fast.to_bits() == plain.to_bits() || fast.is_nan() && plain.is_nan(), "{x:e}");
                    assert_eq!((fast.is_nan(), fast.is_finite()), (x.is_nan(), x.is_finite()), "{x:e}");
                    assert!(low != 0 || x.is_nan() || fast.to_f32().to_bits() == x.to_bits(), "{x:e}");
                    assert_eq!(fast.is_sign_negative(), x.is_sign_negative(), "{x:e}");
                }
            }
        }
    }

    /// Over all random bits the mean is exact: the lower half determines how many are rounded up.
    #[test]
    fn the_expected_value_is_the_number() {
        for x in [1.0 + 2f32.powi(-10), -std::f32::consts::PI, 1e-40, 3.0e38] {
            let ulp = f64::from(f32::from_bits((x.abs().to_bits() & 0xFFFF_0000) + 0x1_0000))
                - f64::from(f32::from_bits(x.abs().to_bits() & 0xFFFF_0000));
            let sum: f64 = (0..=u16::MAX).map(|random| round(x, random).to_f64() - f64::from(x)).sum();
            assert!(sum.abs() < 1e-6 * ulp, "{x:e} is off by {:e} ulp", sum / ulp);
        }
    }
}
