//! Conversions between the floating-point types, rounded to nearest, ties to even.

pub mod narrow;

use crate::{DType, Element, Error, Slice, SliceMut};
use half::{bf16, f16};

/// Copies `src` into `dst`, of the same length, converting each element. NaN stays NaN; numbers that are too large become
/// infinite.
pub fn cast(src: Slice<'_>, mut dst: SliceMut<'_>) -> Result<(), Error> {
    if src.len() != dst.len() {
        return Err(Error::WrongLen { given: src.len(), expected: dst.len() });
    }
    match src.dtype() {
        from if from == dst.dtype() => dst.copy_from(src),
        DType::F32 => from_typed::<f32>(src, dst),
        DType::F64 => from_typed::<f64>(src, dst),
        DType::BF16 => from_typed::<bf16>(src, dst),
        DType::F16 => from_typed::<f16>(src, dst),
        from => Err(Error::NoCast { from, to: dst.dtype() }),
    }
}

fn from_typed<S: Float>(src: Slice<'_>, dst: SliceMut<'_>) -> Result<(), Error> {
    let src = src.typed::<S>()?;
    match dst.dtype() {
        DType::F32 => each(src, dst.into_typed()?, S::to_f32),
        DType::F64 => each(src, dst.into_typed()?, S::to_f64),
        DType::BF16 => each(src, dst.into_typed()?, S::to_bf16),
        DType::F16 => each(src, dst.into_typed()?, S::to_f16),
        to => return Err(Error::NoCast { from: S::DTYPE, to }),
    }
    Ok(())
}

fn each<S: Copy, D>(src: &[S], dst: &mut [D], convert: impl Fn(S) -> D) {
    for (d, &s) in dst.iter_mut().zip(src) {
        *d = convert(s);
    }
}

/// Conversions with a single rounding: f64 to a 16-bit type does not round to f32 first.
trait Float: Element {
    fn to_f32(self) -> f32;
    fn to_f64(self) -> f64;
    fn to_bf16(self) -> bf16;
    fn to_f16(self) -> f16;
}

impl Float for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn to_f64(self) -> f64 {
        self.into()
    }
    fn to_bf16(self) -> bf16 {
        narrow::to_bf16(self)
    }
    fn to_f16(self) -> f16 {
        narrow::to_f16(self)
    }
}

impl Float for f64 {
    fn to_f32(self) -> f32 {
        self as f32
    }
    fn to_f64(self) -> f64 {
        self
    }
    fn to_bf16(self) -> bf16 {
        narrow::to_bf16(round_to_odd(self))
    }
    fn to_f16(self) -> f16 {
        narrow::to_f16(round_to_odd(self))
    }
}

macro_rules! sixteen_bits {
    ($t:ty, $same:ident, $other:ident, $o:ty, $widen:path) => {
        impl Float for $t {
            fn to_f32(self) -> f32 {
                $widen(self)
            }
            fn to_f64(self) -> f64 {
                $widen(self).into()
            }
            fn $same(self) -> $t {
                self
            }
            fn $other(self) -> $o {
                narrow::$other($widen(self))
            }
        }
    };
}
sixteen_bits!(bf16, to_bf16, to_f16, f16, narrow::from_bf16);
sixteen_bits!(f16, to_f16, to_bf16, bf16, narrow::from_f16);

/// Returns the f32 next to `x` towards zero, with its last bit set if that is not exact. Rounding the result to 8 or 11 bits is
/// then the single rounding of `x` (Boldo and Melquiond, 2008); `half`'s own conversion drops the low half of the significand.
fn round_to_odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || near.is_nan() {
        return near;
    }
    let away = f64::from(near.abs()) > x.abs();
    f32::from_bits((near.to_bits() - u32::from(away)) | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one<S: Element, D: Element>(from: S, zero: D) -> D {
        let mut to = [zero];
        cast(Slice::from(&[from][..]), SliceMut::from(&mut to[..])).unwrap();
        to[0]
    }

    #[test]
    fn halves_round_trip_and_widen_exactly() {
        for bits in 0..=u16::MAX {
            let (b, h) = (bf16::from_bits(bits), f16::from_bits(bits));
            if !b.is_nan() {
                assert_eq!(one(one(b, 0f32), bf16::ZERO).to_bits(), bits);
                assert_eq!(one(one(b, 0f64), bf16::ZERO).to_bits(), bits);
            }
            if !h.is_nan() {
                assert_eq!(one(one(h, 0f32), f16::ZERO).to_bits(), bits);
                assert_eq!(one(one(h, 0f64), f16::ZERO).to_bits(), bits);
            }
        }
        assert!(one(bf16::NAN, f16::ZERO).is_nan() && one(f16::NAN, 0f32).is_nan());
    }

    #[test]
    fn ties_go_to_even_and_f64_rounds_once() {
        assert_eq!(one(1.0 + 2f32.powi(-8), bf16::ZERO).to_f32(), 1.0);
        assert_eq!(one(1.0 + 3.0 * 2f32.powi(-8), bf16::ZERO).to_f32(), 1.0 + 2f32.powi(-6));
        // Just above the tie: rounding to f32 first would give the tie, which rounds down.
        assert_eq!(one(1.0 + 2f64.powi(-8) + 2f64.powi(-40), bf16::ZERO).to_f32(), 1.0 + 2f32.powi(-7));
        assert_eq!(one(1.0 + 2f64.powi(-11) + 2f64.powi(-40), f16::ZERO).to_f32(), 1.0 + 2f32.powi(-10));
        assert!(one(1e6f32, f16::ZERO).is_infinite() && one(1e300f64, 0f32).is_infinite());
    }

    #[test]
    fn integers_and_unequal_lengths_are_refused() {
        let mut to = [0f32; 2];
        let integers = cast(Slice::from(&[1u64, 2][..]), SliceMut::from(&mut to[..]));
        assert_eq!(integers, Err(Error::NoCast { from: DType::U64, to: DType::F32 }));
        let short = cast(Slice::from(&[1f64][..]), SliceMut::from(&mut to[..]));
        assert_eq!(short, Err(Error::WrongLen { given: 1, expected: 2 }));
    }
}
