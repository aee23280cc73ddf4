//! Rounding f32 to bf16 up or down at random, so that small changes count on average.
//!
//! ```text
//! bits = the upper half of (bits + random)      random of 16 bits: up with probability (lower half) / 2^16
//! ```
//!
//! The expected value is the number itself (Gupta et al., *Deep learning with limited numerical precision*, 2015). bf16
//! numbers, zeros and infinities stay what they are, NaN stays some NaN, and finite numbers stay finite: beyond the largest
//! bf16 number, rounding is towards it.

use meshstep_tensor::bf16;

const INFINITE: u32 = 0x7F80;

/// `x` rounded with these random bits, in a form that vectorises.
#[inline(always)]
pub(crate) fn round(x: f32, random: u16) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(u32::from(random)) >> 16;
    let finite = rounded - u32::from(rounded & 0x7FFF == INFINITE);
    let special = (bits >> 16) | if x.is_nan() { 0x40 } else { 0 };
    let is_finite = bits & 0x7F80_0000 != 0x7F80_0000;
    bf16::from_bits(if is_finite { finite } else { special } as u16)
}

/// The same, obviously.
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

    /// Over all random bits the mean is exact: as many go up as the lower half says.
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
