//! Borrowed flat memory that knows its element type.

use crate::{DType, Element, Error, cast};
use half::{bf16, f16};
use std::ops::Range;

/// Shared flat memory of one [`DType`].
#[derive(Clone, Copy, Debug)]
pub struct Slice<'a> {
    bytes: &'a [u8],
    dtype: DType,
}

/// Exclusive flat memory of one [`DType`].
#[derive(Debug)]
pub struct SliceMut<'a> {
    bytes: &'a mut [u8],
    dtype: DType,
}

impl<'a> Slice<'a> {
    pub(crate) fn from_bytes(bytes: &'a [u8], dtype: DType) -> Self {
        Slice { bytes, dtype }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The memory as bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements as `T`, or an error naming both types.
    pub fn typed<T: Element>(&self) -> Result<&'a [T], Error> {
        check(T::DTYPE, self.dtype)?;
        // Memory enters a slice as `&[T]` or from a 64-byte aligned slab cut at elements, so the cast cannot fail.
        Ok(bytemuck::cast_slice(self.bytes))
    }

    /// Elements `range`.
    pub fn slice(&self, range: Range<usize>) -> Result<Slice<'a>, Error> {
        let bytes = byte_range(&range, self.len(), self.dtype)?;
        Ok(Slice { bytes: &self.bytes[bytes], dtype: self.dtype })
    }
}

impl<'a> SliceMut<'a> {
    pub(crate) fn from_bytes(bytes: &'a mut [u8], dtype: DType) -> Self {
        SliceMut { bytes, dtype }
    }

    /// No elements of `dtype`.
    pub fn empty(dtype: DType) -> Self {
        // Aligned as the widest element is, so that it views as any of them.
        SliceMut { bytes: bytemuck::cast_slice_mut(&mut [] as &mut [u64]), dtype }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The same memory for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_> {
        SliceMut { bytes: self.bytes, dtype: self.dtype }
    }

    /// The same memory, shared.
    pub fn as_slice(&self) -> Slice<'_> {
        Slice { bytes: self.bytes, dtype: self.dtype }
    }

    /// The memory as bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// The elements as `T`, or an error naming both types.
    pub fn typed_mut<T: Element>(&mut self) -> Result<&mut [T], Error> {
        self.reborrow().into_typed()
    }

    /// The elements as `T` for as long as the memory is borrowed, or an error naming both types.
    pub fn into_typed<T: Element>(self) -> Result<&'a mut [T], Error> {
        check(T::DTYPE, self.dtype)?;
        Ok(bytemuck::cast_slice_mut(self.bytes))
    }

    /// Elements `range`.
    pub fn slice(self, range: Range<usize>) -> Result<SliceMut<'a>, Error> {
        let bytes = byte_range(&range, self.len(), self.dtype)?;
        Ok(SliceMut { bytes: &mut self.bytes[bytes], dtype: self.dtype })
    }

    /// Elements `..at` and `at..`.
    pub fn split_at(self, at: usize) -> Result<(SliceMut<'a>, SliceMut<'a>), Error> {
        let bytes = byte_range(&(0..at), self.len(), self.dtype)?;
        let (left, right) = self.bytes.split_at_mut(bytes.end);
        Ok((SliceMut { bytes: left, dtype: self.dtype }, SliceMut { bytes: right, dtype: self.dtype }))
    }

    /// Copies `src`, of the same length and type.
    pub fn copy_from(&mut self, src: Slice<'_>) -> Result<(), Error> {
        check(src.dtype, self.dtype)?;
        if src.len() != self.len() {
            return Err(Error::WrongLen { given: src.len(), expected: self.len() });
        }
        self.bytes.copy_from_slice(src.bytes);
        Ok(())
    }

    /// Copies `src`, of the same length, rounding each element to nearest, ties to even.
    pub fn cast_from(&mut self, src: Slice<'_>) -> Result<(), Error> {
        cast(src, self.reborrow())
    }

    /// Multiplies every element by `factor`, in f32 with the factor rounded to f32, or in f64; each product is rounded once.
    pub fn scale(&mut self, factor: f64) -> Result<(), Error> {
        let narrow = factor as f32;
        match self.dtype {
            DType::F32 => each(self.typed_mut::<f32>()?, |x| x * narrow),
            DType::F64 => each(self.typed_mut::<f64>()?, |x| x * factor),
            DType::BF16 => each(self.typed_mut()?, |x: bf16| bf16::from_f32(x.to_f32() * narrow)),
            DType::F16 => each(self.typed_mut()?, |x: f16| f16::from_f32(x.to_f32() * narrow)),
            holds @ (DType::U16 | DType::U64) => {
                return Err(Error::WrongDType { asked: DType::F64, holds });
            }
        }
        Ok(())
    }

    /// Sets every element to zero.
    pub fn zero(&mut self) {
        self.bytes.fill(0);
    }
}

impl<'a, T: Element> From<&'a [T]> for Slice<'a> {
    fn from(values: &'a [T]) -> Self {
        Slice { bytes: bytemuck::cast_slice(values), dtype: T::DTYPE }
    }
}

impl<'a, T: Element> From<&'a mut [T]> for SliceMut<'a> {
    fn from(values: &'a mut [T]) -> Self {
        SliceMut { bytes: bytemuck::cast_slice_mut(values), dtype: T::DTYPE }
    }
}

fn each<T: Copy>(values: &mut [T], f: impl Fn(T) -> T) {
    values.iter_mut().for_each(|x| *x = f(*x));
}

fn check(asked: DType, holds: DType) -> Result<(), Error> {
    if asked == holds { Ok(()) } else { Err(Error::WrongDType { asked, holds }) }
}

fn byte_range(range: &Range<usize>, len: usize, dtype: DType) -> Result<Range<usize>, Error> {
    if range.start > range.end || range.end > len {
        return Err(Error::bounds(range.clone(), len));
    }
    Ok(range.start * dtype.size()..range.end * dtype.size())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked() {
        let values = [1.0f32, 2.0, 3.0];
        let slice = Slice::from(&values[..]);
        assert_eq!(slice.slice(1..3).unwrap().typed::<f32>().unwrap(), [2.0, 3.0]);
        assert_eq!(slice.slice(2..4).unwrap_err(), Error::OutOfBounds { start: 2, end: 4, len: 3 });
        let backwards = std::ops::Range { start: 2, end: 1 };
        assert!(slice.slice(backwards).is_err());
    }

    #[test]
    fn copies_need_equal_types_and_lengths() {
        let mut to = [0.0f32; 2];
        let mut to = SliceMut::from(&mut to[..]);
        let long = Slice::from(&[1.0f32, 2.0, 3.0][..]);
        assert_eq!(to.copy_from(long).unwrap_err(), Error::WrongLen { given: 3, expected: 2 });
        let wide = Slice::from(&[1.0f64, 2.0][..]);
        assert!(matches!(to.copy_from(wide), Err(Error::WrongDType { .. })));
        to.cast_from(wide).unwrap();
        assert_eq!(to.typed_mut::<f32>().unwrap(), [1.0, 2.0]);
        to.scale(0.5).unwrap();
        assert_eq!(to.typed_mut::<f32>().unwrap(), [0.5, 1.0]);
        assert!(SliceMut::from(&mut [1u64][..]).scale(2.0).is_err());
        assert!(SliceMut::from(&mut [1u16][..]).scale(2.0).is_err());
        assert_eq!(SliceMut::empty(DType::F64).into_typed::<f64>().unwrap(), []);
    }
}
