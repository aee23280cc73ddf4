//! Conversions of the 16-bit floats that vectorise: no branch, no table, no call.
//!
//! The results equal those of the `half` crate bit for bit; its conversions check the CPU's features once per element.

use half::{bf16, f16};

/// Converts to f32, exactly.
#[inline(always)]
pub fn from_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Rounds to the nearest bf16, ties to even; NaN stays NaN.
#[inline(always)]
pub fn to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let odd = (bits >> 16) & 1;
    // Adds half a unit of the last kept place, less one bit if that place is even: a tie then does not carry.
    let rounded = bits.wrapping_add(0x7FFF + odd) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
}

/// Converts to f32, exactly.
#[inline(always)]
pub fn from_f16(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    let magnitude = (bits & 0x7FFF) << 13;
    // Read as f32, the exponent is 112 too small; the product corrects it, also for subnormals.
    let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let special = f32::from_bits(magnitude | 0xFF << 23);
    let value = if bits & 0x7C00 == 0x7C00 { special } else { scaled };
    f32::from_bits(value.to_bits() | (bits & 0x8000) << 16)
}

/// Rounds to the nearest f16, ties to even; numbers that are too large become infinite, NaN stays NaN.
#[inline(always)]
pub fn to_f16(x: f32) -> f16 {
    const LARGEST_BELOW_INFINITY: u32 = 0x477F_EFFF; // 65519.996; 65520 rounds to infinity
    const SMALLEST_NORMAL: u32 = 113 << 23; // 2^-14
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + odd) >> 13;
    // One unit of the last place of 0.5 is 2^-24, the smallest subnormal: the addition itself rounds to that grid.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let nan = 0x7E00 | (magnitude >> 13) & 0x3FF;
    let finite = if magnitude < SMALLEST_NORMAL { subnormal } else { normal };
    let large = if magnitude > 0x7F80_0000 { nan } else { 0x7C00 };
    f16::from_bits((sign | if magnitude > LARGEST_BELOW_INFINITY { large } else { finite }) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agree(x: f32) {
        let (b, h) = (bf16::from_f32(x), f16::from_f32(x));
        assert_eq!(to_bf16(x).to_bits(), b.to_bits(), "bf16 of {x:?} {:#x}", x.to_bits());
        assert_eq!(to_f16(x).to_bits(), h.to_bits(), "f16 of {x:?} {:#x}", x.to_bits());
    }

    #[test]
    fn every_16_bit_value_widens_as_it_should() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(same(from_bf16(b), b.to_f32()) && same(from_f16(h), h.to_f32()), "{bits:#x}");
        }
    }

    #[test]
    fn every_f32_near_a_tie_rounds_as_it_should() {
        // Both types round within the low 17 bits. The short run tries all patterns of the upper 16 bits with every low part near
        // a boundary, and a stride that is coprime to them; the long run tries every f32.
        if meshstep_cases::long() {
            return (0..=u32::MAX).for_each(|bits| agree(f32::from_bits(bits)));
        }
        for high in 0..=u32::from(u16::MAX) {
            for low in
                [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
            {
                agree(f32::from_bits(high << 16 | low));
            }
        }
        (0..1u32 << 22).for_each(|i| agree(f32::from_bits(i.wrapping_mul(0x9E37_79B1))));
    }
}
