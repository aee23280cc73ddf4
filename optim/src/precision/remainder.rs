//! An f32 number in two halves of 16 bits: a bf16 number for the model, and the remainder.
//!
//! ```text
//! high      = the nearest bf16, ties to even
//! remainder = bits - high * 2^16, within +-32767     as an integer of 16 bits; 0 where `high` is not finite
//! bits      = high * 2^16 + remainder
//! ```
//!
//! This way a master costs two bytes instead of four, and the model's bf16 number equals the one beside an f32 master. Among all 2^32
//! bit patterns,
//!
//! - 65,278 move by one ulp: those half-way between two finite bf16 numbers, towards the one they round to, so that a joined number is
//!   nearest to its bf16 half under any tie rule. There are 2 * 255 * 128 finite bf16 numbers, each with a tie above it in magnitude; the
//!   ties above the two largest round to infinity instead.
//! - 65,536 saturate: the 2 * 32,768 finite numbers with an infinite nearest bf16 become infinite.
//! - NaN stays some NaN. All others round-trip exactly, and the result of one round trip always round-trips exactly.

use crate::Error;
use meshstep_tensor::{DType, Slice, SliceMut, bf16};

/// Lower half of an f32 number half-way between two bf16 numbers, and the largest lower half that is nearer to the one below.
const TIE: u16 = 0x8000;
const NEAR: u16 = 0x7FFF;

/// bf16 bits of infinity, and the bit that keeps a NaN a NaN.
const INFINITE: u16 = 0x7F80;
const QUIET: u16 = 0x40;

/// Splits `x` into a bf16 parameter and its remainder.
pub fn split(x: f32) -> (bf16, u16) {
    split_bits((x.to_bits() >> 16) as u16, x.to_bits() as u16)
}

/// Returns the f32 master of a bf16 parameter and its remainder: the f32 number with the bits `high * 2^16 + remainder`, with the
/// remainder as a signed integer.
///
/// ```
/// use meshstep_optim::remainder::{join, split};
/// use meshstep_tensor::bf16;
///
/// let (param, remainder) = split(1.001);
/// assert_eq!((param, join(param, remainder)), (bf16::ONE, 1.001));
/// ```
#[inline(always)]
pub fn join(high: bf16, remainder: u16) -> f32 {
    let off = i32::from(remainder as i16) as u32;
    f32::from_bits((u32::from(high.to_bits()) << 16).wrapping_add(off))
}

/// Writes the f32 masters of bf16 parameters and their u16 remainders, all on the CPU and of one length, into `masters`.
pub fn join_all<'p, 'r, 'm>(
    params: impl Into<Slice<'p>>,
    remainders: impl Into<Slice<'r>>,
    masters: impl Into<SliceMut<'m>>,
) -> Result<(), Error> {
    let (params, remainders, mut masters) = (params.into(), remainders.into(), masters.into());
    let types = [
        ("params", params.dtype(), DType::BF16, "bf16"),
        ("a remainder", remainders.dtype(), DType::U16, "u16"),
        ("masters", masters.dtype(), DType::F32, "f32"),
    ];
    if let Some(&(what, given, _, works)) = types.iter().find(|(_, given, expected, _)| given != expected) {
        return Err(Error::DType { what, given, works });
    }
    let expected = params.len();
    for (what, given) in [("remainder", remainders.len()), ("masters", masters.len())] {
        if given != expected {
            return Err(Error::Len { what, given, expected });
        }
    }
    let halves = params.typed()?.iter().zip(remainders.typed()?);
    masters.typed_mut()?.iter_mut().zip(halves).for_each(|(x, (&high, &low))| *x = join(high, low));
    Ok(())
}

/// Splits the number with bits `upper * 2^16 + lower` into halves, in a form that vectorises: twice as many lanes fit with 16 bits.
#[inline(always)]
pub(crate) fn split_bits(upper: u16, lower: u16) -> (bf16, u16) {
    let odd = upper & 1;
    // A tie goes up from an odd half, which leaves -2^15, and stays at an even one, which leaves 2^15; both shrink by one in magnitude.
    let rounded = upper.wrapping_add(u16::from(lower > TIE - odd));
    let near = if lower == TIE { NEAR + 2 * odd } else { lower };
    let magnitude = upper & 0x7FFF;
    let nan = magnitude > INFINITE || (magnitude == INFINITE && lower != 0);
    let high = if nan { upper | QUIET } else { rounded };
    (bf16::from_bits(high), if high & INFINITE == INFINITE { 0 } else { near })
}

/// Splits `x` into halves, by the obvious way.
pub(crate) fn split_plainly(x: f32) -> (bf16, u16) {
    let high = bf16::from_f32(x);
    if !high.is_finite() {
        return (high, 0);
    }
    let off = i64::from(x.to_bits()) - (i64::from(high.to_bits()) << 16);
    let near = match off {
        0x8000 => 0x7FFF,
        -0x8000 => -0x7FFF,
        off => off,
    };
    (high, near as i16 as u16)
}

/// Joins the halves of a number, by the obvious way.
pub(crate) fn join_plainly(high: bf16, remainder: u16) -> f32 {
    let bits = (i64::from(high.to_bits()) << 16) + i64::from(remainder as i16);
    f32::from_bits(bits as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts of numbers that moved by one ulp or became infinite.
    #[derive(Debug, Default, PartialEq)]
    struct Moved {
        by_one: u64,
        to_infinity: u64,
    }

    impl Moved {
        fn see(&mut self, bits: u32) {
            let x = f32::from_bits(bits);
            let (high, remainder) = split(x);
            assert!(same(high.to_f32(), bf16::from_f32(x).to_f32()), "{bits:#x} is not nearest");
            assert_eq!(in_bits(split_plainly(x)), in_bits((high, remainder)), "{bits:#x}");
            let back = join(high, remainder);
            assert_eq!(join_plainly(high, remainder).to_bits(), back.to_bits(), "{bits:#x}");
            let again = back.to_bits();
            let again = split_bits((again >> 16) as u16, again as u16);
            assert_eq!(in_bits(again), in_bits((high, remainder)), "{bits:#x} does not stay");
            if same(x, back) {
                return;
            }
            if back.is_infinite() && x.is_finite() && x.signum() == back.signum() {
                self.to_infinity += 1;
            } else {
                assert_eq!(bits.abs_diff(back.to_bits()), 1, "{bits:#x}");
                self.by_one += 1;
            }
        }
    }

    fn in_bits((high, remainder): (bf16, u16)) -> (u16, u16) {
        (high.to_bits(), remainder)
    }

    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
    }

    /// Includes every pattern that is not exact: all lower halves beside the largest numbers, all upper halves with a lower half near a
    /// tie. The long run tests all patterns.
    #[test]
    fn exactly_ties_move_and_what_is_too_large_saturates() {
        let mut moved = Moved::default();
        if meshstep_cases::long() {
            (0..=u32::MAX).for_each(|bits| moved.see(bits));
        } else {
            let largest = |high: u32| high & 0x7FFF == 0x7F7F;
            for high in 0..=0xFFFFu32 {
                let lows = if largest(high) { 0..=0xFFFF } else { 0x7FF0..=0x8010 };
                lows.for_each(|low| moved.see(high << 16 | low));
            }
        }
        assert_eq!(moved, Moved { by_one: 65_278, to_infinity: 65_536 });
    }

    #[test]
    fn a_million_random_numbers_come_back() {
        let mut state = 1u64;
        let mut moved = Moved::default();
        for _ in 0..1_000_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            moved.see((state >> 32) as u32);
        }
        assert!(moved.by_one < 100 && moved.to_infinity < 100, "{moved:?}");
    }
}
