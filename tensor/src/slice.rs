//! Borrowed flat memory with its element type.

use crate::non_temporal::copy_bytes_non_temporal;
use crate::{DType, Element, Error, Place, cast};
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;

/// Shared flat memory of one [`DType`].
///
/// Slices, arrays and vectors of an [`Element`] convert into it by reference:
///
/// ```
/// use meshstep_tensor::{DType, Slice, SliceMut, bf16};
///
/// let values = vec![bf16::ONE; 3];
/// assert_eq!(Slice::from(&values).dtype(), DType::BF16);
/// assert_eq!(Slice::from(&[1f32, 2.0]).len(), 2);
/// let mut out = vec![0f32; 2];
/// SliceMut::from(&mut out).copy_from(Slice::from(&[1f32, 2.0]))?;
/// assert_eq!(out, [1.0, 2.0]);
/// # Ok::<(), meshstep_tensor::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Slice<'a> {
    start: NonNull<u8>,
    bytes: usize,
    dtype: DType,
    place: Place,
    _borrow: PhantomData<&'a [u8]>,
}

/// Exclusive flat memory of one [`DType`].
#[derive(Debug)]
pub struct SliceMut<'a> {
    start: NonNull<u8>,
    bytes: usize,
    dtype: DType,
    place: Place,
    _borrow: PhantomData<&'a mut [u8]>,
}

// SAFETY: as for `&[u8]`: no thread writes the memory while it is borrowed.
unsafe impl Send for Slice<'_> {}
// SAFETY: as above.
unsafe impl Sync for Slice<'_> {}
// SAFETY: as for `&mut [u8]`: no other reference accesses the memory while it is borrowed.
unsafe impl Send for SliceMut<'_> {}
// SAFETY: as above; `&SliceMut` only reads.
unsafe impl Sync for SliceMut<'_> {}

impl<'a> Slice<'a> {
    fn of_cpu(bytes: &'a [u8], dtype: DType) -> Self {
        let start = NonNull::from(bytes).cast();
        Slice { start, bytes: bytes.len(), dtype, place: Place::Cpu, _borrow: PhantomData }
    }

    /// # Safety
    /// - `start` is the address of `bytes` initialised bytes at `place`: whole elements of `dtype`, aligned for it.
    /// - The bytes are not written for `'a`.
    pub(crate) unsafe fn from_parts(start: NonNull<u8>, bytes: usize, dtype: DType, place: Place) -> Self {
        Slice { start, bytes, dtype, place, _borrow: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes / self.dtype.size()
    }

    /// Returns true if there is no element.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Size of all elements in bytes.
    pub fn size(&self) -> usize {
        self.bytes
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Place of the memory.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Address of the first element, valid only at its [`place`](Self::place).
    pub fn address(&self) -> usize {
        self.start.addr().get()
    }

    /// Returns the memory as bytes, or an error if it is not on the CPU.
    pub fn bytes(&self) -> Result<&'a [u8], Error> {
        self.place.check(Place::Cpu)?;
        // SAFETY: the memory is on the CPU. Every slice is made from this many initialised bytes, which are not written for `'a`.
        Ok(unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) })
    }

    /// Returns the elements as `T`, or an error with both types, or with the place if it is not the CPU.
    pub fn typed<T: Element>(&self) -> Result<&'a [T], Error> {
        check(T::DTYPE, self.dtype)?;
        // Memory enters a slice as `&[T]` or from a 64-byte aligned slab cut at elements, so the cast cannot fail.
        Ok(bytemuck::cast_slice(self.bytes()?))
    }

    /// Returns the elements `range`.
    pub fn slice(&self, range: Range<usize>) -> Result<Slice<'a>, Error> {
        let bytes = byte_range(&range, self.len(), self.dtype)?;
        // SAFETY: the range is inside this one.
        Ok(unsafe { Slice::from_parts(beyond(self.start, bytes.start), bytes.len(), self.dtype, self.place) })
    }
}

impl<'a> SliceMut<'a> {
    fn of_cpu(bytes: &'a mut [u8], dtype: DType) -> Self {
        let len = bytes.len();
        SliceMut {
            start: NonNull::from(bytes).cast(),
            bytes: len,
            dtype,
            place: Place::Cpu,
            _borrow: PhantomData,
        }
    }

    /// # Safety
    /// As for [`Slice::from_parts`], and no other reference accesses the bytes for `'a`.
    pub(crate) unsafe fn from_parts(start: NonNull<u8>, bytes: usize, dtype: DType, place: Place) -> Self {
        SliceMut { start, bytes, dtype, place, _borrow: PhantomData }
    }

    /// Returns an empty slice of `dtype` at `place`.
    pub fn empty(dtype: DType, place: Place) -> Self {
        // Aligned for the widest element type, so that it can be viewed as any type.
        let nothing = SliceMut::of_cpu(bytemuck::cast_slice_mut(&mut [] as &mut [u64]), dtype);
        SliceMut { place, ..nothing }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes / self.dtype.size()
    }

    /// Returns true if there is no element.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Place of the memory.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Address of the first element, valid only at its [`place`](Self::place).
    pub fn address(&self) -> usize {
        self.start.addr().get()
    }

    /// Borrows the same memory for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_> {
        // SAFETY: the same memory, and `self` is borrowed exclusively meanwhile.
        unsafe { SliceMut::from_parts(self.start, self.bytes, self.dtype, self.place) }
    }

    /// Borrows the same memory, shared.
    pub fn as_slice(&self) -> Slice<'_> {
        // SAFETY: the same memory, and `self` is borrowed meanwhile.
        unsafe { Slice::from_parts(self.start, self.bytes, self.dtype, self.place) }
    }

    /// Returns the same memory, shared.
    pub fn into_slice(self) -> Slice<'a> {
        // SAFETY: the same memory, and `self`, which was borrowed exclusively for `'a`, is consumed.
        unsafe { Slice::from_parts(self.start, self.bytes, self.dtype, self.place) }
    }

    /// Returns the memory as bytes, or an error if it is not on the CPU.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], Error> {
        self.reborrow().into_bytes()
    }

    fn into_bytes(self) -> Result<&'a mut [u8], Error> {
        self.place.check(Place::Cpu)?;
        // SAFETY: the memory is on the CPU. Every slice is made from this many initialised bytes, which no other reference
        // accesses for `'a`; `self` is consumed.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) })
    }

    /// Returns the elements as `T`, or an error with both types, or with the place if it is not the CPU.
    pub fn typed_mut<T: Element>(&mut self) -> Result<&mut [T], Error> {
        self.reborrow().into_typed()
    }

    /// Returns the elements as `T` for as long as the memory is borrowed; errors as for [`typed_mut`](Self::typed_mut).
    pub fn into_typed<T: Element>(self) -> Result<&'a mut [T], Error> {
        check(T::DTYPE, self.dtype)?;
        Ok(bytemuck::cast_slice_mut(self.into_bytes()?))
    }

    /// Returns the elements `range`.
    pub fn slice(self, range: Range<usize>) -> Result<SliceMut<'a>, Error> {
        let bytes = byte_range(&range, self.len(), self.dtype)?;
        // SAFETY: the range is inside this one, which is consumed.
        Ok(unsafe {
            SliceMut::from_parts(beyond(self.start, bytes.start), bytes.len(), self.dtype, self.place)
        })
    }

    /// Splits into the elements `..at` and `at..`.
    pub fn split_at(self, at: usize) -> Result<(SliceMut<'a>, SliceMut<'a>), Error> {
        let left = byte_range(&(0..at), self.len(), self.dtype)?.end;
        // SAFETY: both are inside this slice, which is consumed, and have no byte in common.
        let parts = unsafe {
            let right = beyond(self.start, left);
            (
                SliceMut::from_parts(self.start, left, self.dtype, self.place),
                SliceMut::from_parts(right, self.bytes - left, self.dtype, self.place),
            )
        };
        Ok(parts)
    }

    /// Copies `src`, of the same length and type.
    pub fn copy_from(&mut self, src: Slice<'_>) -> Result<(), Error> {
        check(src.dtype, self.dtype)?;
        if src.len() != self.len() {
            return Err(Error::WrongLen { given: src.len(), expected: self.len() });
        }
        self.bytes_mut()?.copy_from_slice(src.bytes()?);
        Ok(())
    }

    /// Copies `src`, of the same length and type, by non-temporal stores, as [`copy_non_temporal`](crate::copy_non_temporal) does.
    pub fn copy_non_temporal_from(&mut self, src: Slice<'_>) -> Result<(), Error> {
        check(src.dtype, self.dtype)?;
        if src.len() != self.len() {
            return Err(Error::WrongLen { given: src.len(), expected: self.len() });
        }
        copy_bytes_non_temporal(self.bytes_mut()?, src.bytes()?);
        Ok(())
    }

    /// Copies `src`, of the same length, converting each element: nearest, ties to even.
    pub fn cast_from(&mut self, src: Slice<'_>) -> Result<(), Error> {
        cast(src, self.reborrow())
    }

    /// Multiplies every element by `factor`: in f32 with the factor rounded to f32, or in f64. Each product is rounded once.
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
    pub fn zero(&mut self) -> Result<(), Error> {
        self.bytes_mut()?.fill(0);
        Ok(())
    }
}

impl<'a, T: Element> From<&'a [T]> for Slice<'a> {
    fn from(values: &'a [T]) -> Self {
        Slice::of_cpu(bytemuck::cast_slice(values), T::DTYPE)
    }
}

impl<'a, T: Element> From<&'a mut [T]> for SliceMut<'a> {
    fn from(values: &'a mut [T]) -> Self {
        SliceMut::of_cpu(bytemuck::cast_slice_mut(values), T::DTYPE)
    }
}

impl<'a, T: Element, const N: usize> From<&'a [T; N]> for Slice<'a> {
    fn from(values: &'a [T; N]) -> Self {
        values.as_slice().into()
    }
}

impl<'a, T: Element> From<&'a Vec<T>> for Slice<'a> {
    fn from(values: &'a Vec<T>) -> Self {
        values.as_slice().into()
    }
}

impl<'a, T: Element, const N: usize> From<&'a mut [T; N]> for SliceMut<'a> {
    fn from(values: &'a mut [T; N]) -> Self {
        values.as_mut_slice().into()
    }
}

impl<'a, T: Element> From<&'a mut Vec<T>> for SliceMut<'a> {
    fn from(values: &'a mut Vec<T>) -> Self {
        values.as_mut_slice().into()
    }
}

/// Returns the address `bytes` further on. The CPU need not be able to dereference it.
pub(crate) fn beyond(start: NonNull<u8>, bytes: usize) -> NonNull<u8> {
    start.map_addr(|address| address.saturating_add(bytes))
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
        assert_eq!(to.copy_non_temporal_from(long).unwrap_err(), Error::WrongLen { given: 3, expected: 2 });
        assert!(matches!(to.copy_non_temporal_from(wide), Err(Error::WrongDType { .. })));
        to.copy_non_temporal_from(long.slice(1..3).unwrap()).unwrap();
        assert_eq!(to.typed_mut::<f32>().unwrap(), [2.0, 3.0]);
        to.cast_from(wide).unwrap();
        assert_eq!(to.typed_mut::<f32>().unwrap(), [1.0, 2.0]);
        to.scale(0.5).unwrap();
        assert_eq!(to.typed_mut::<f32>().unwrap(), [0.5, 1.0]);
        assert!(SliceMut::from(&mut [1u64][..]).scale(2.0).is_err());
        assert!(SliceMut::from(&mut [1u16][..]).scale(2.0).is_err());
        assert_eq!(SliceMut::empty(DType::F64, Place::Cpu).into_typed::<f64>().unwrap(), []);
    }
}
