//! The exclusive owner of a range of flat memory.

use crate::memory::Slab;
use crate::slice::beyond;
use crate::{Category, DType, Element, Error, Meter, Place, Queue, Slice, SliceMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Owns a range of one allocation, typed by a [`DType`].
///
/// A buffer splits in two and joins again without copying, so that parts of one allocation (buckets of gradients, a
/// parameter's place in a bucket) travel singly while the memory stays flat. The memory is released, and no longer
/// counted, when the last part is gone.
#[derive(Debug)]
pub struct Buffer {
    slab: Arc<Slab>,
    /// First element, counted from the slab's base.
    start: usize,
    len: usize,
    dtype: DType,
}

impl Buffer {
    /// `len` zeros of `dtype`, counted under `category`. Aligned to 64 bytes at least.
    pub fn zeroed(len: usize, dtype: DType, meter: &Meter, category: Category) -> Result<Self, Error> {
        Self::zeroed_apart(len, dtype, meter, category, &[])
    }

    /// The same, at an address that modulo 4096 is none of `apart`'s, up to fifteen of them: for buffers that are streamed
    /// together, which the processor would otherwise mistake for one another. Buffers below a page keep no distance.
    pub fn zeroed_apart(
        len: usize,
        dtype: DType,
        meter: &Meter,
        category: Category,
        apart: &[usize],
    ) -> Result<Self, Error> {
        let slab = Slab::zeroed(bytes(len, dtype)?, apart, meter, category)?;
        Ok(Buffer { slab: Arc::new(slab), start: 0, len, dtype })
    }

    /// `len` zeros of `dtype` where `queue` works, once its work so far and their zeroing are done; counted under `category`.
    pub fn zeroed_on(
        queue: &Queue,
        len: usize,
        dtype: DType,
        meter: &Meter,
        category: Category,
    ) -> Result<Self, Error> {
        #[cfg(feature = "cuda")]
        if let Some(stream) = queue.stream() {
            stream.outside_graphs("making a buffer")?;
            let slab = Slab::on_device(stream, bytes(len, dtype)?, meter, category)?;
            let mut buffer = Buffer { slab: Arc::new(slab), start: 0, len, dtype };
            stream.zero(buffer.as_mut())?;
            return Ok(buffer);
        }
        let _ = queue;
        Self::zeroed(len, dtype, meter, category)
    }

    /// All of an allocation, or its first elements.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_slab(slab: Slab, len: usize, dtype: DType) -> Self {
        Buffer { slab: Arc::new(slab), start: 0, len, dtype }
    }

    /// A copy of `values`, counted under `category`.
    pub fn from_slice<T: Element>(values: &[T], meter: &Meter, category: Category) -> Result<Self, Error> {
        let mut buffer = Self::zeroed(values.len(), T::DTYPE, meter, category)?;
        buffer.typed_mut()?.copy_from_slice(values);
        Ok(buffer)
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the memory is.
    pub fn place(&self) -> Place {
        self.slab.place()
    }

    /// Bytes of this range.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Reads the range.
    pub fn as_slice(&self) -> Slice<'_> {
        // SAFETY: the range lies within the slab, whose bytes are initialised; this buffer alone owns the range, and
        // the borrow of `self` keeps writers away for as long as the slice lives.
        unsafe { Slice::from_parts(self.as_ptr(), self.bytes(), self.dtype, self.place()) }
    }

    /// Reads and writes the range.
    pub fn as_mut(&mut self) -> SliceMut<'_> {
        // SAFETY: as in `as_slice`; the borrow is exclusive, so this is the only way to the range meanwhile.
        unsafe { SliceMut::from_parts(self.as_ptr(), self.bytes(), self.dtype, self.place()) }
    }

    /// The elements as `T`, or an error naming both types.
    pub fn typed<T: Element>(&self) -> Result<&[T], Error> {
        self.as_slice().typed()
    }

    /// The elements as `T`, mutably, or an error naming both types.
    pub fn typed_mut<T: Element>(&mut self) -> Result<&mut [T], Error> {
        self.as_mut().into_typed()
    }

    /// Keeps elements `..at` and returns the owner of `at..`.
    pub fn split_off(&mut self, at: usize) -> Result<Buffer, Error> {
        let len = self.len.checked_sub(at).ok_or(Error::bounds(at..self.len, self.len))?;
        self.len = at;
        Ok(Buffer { slab: Arc::clone(&self.slab), start: self.start + at, len, dtype: self.dtype })
    }

    /// All elements; this buffer keeps an empty range at its start.
    pub fn take(&mut self) -> Buffer {
        let len = std::mem::take(&mut self.len);
        Buffer { slab: Arc::clone(&self.slab), start: self.start, len, dtype: self.dtype }
    }

    /// One owner of both ranges when `next` begins where this ends in the same allocation; otherwise both again.
    pub fn join(mut self, next: Buffer) -> Result<Buffer, (Buffer, Buffer)> {
        let adjacent = self.start + self.len == next.start && self.dtype == next.dtype;
        if !adjacent || !Arc::ptr_eq(&self.slab, &next.slab) {
            return Err((self, next));
        }
        self.len += next.len;
        Ok(self)
    }

    /// Where the range begins at its [`place`](Self::place), for backends that move bytes between buffers of several owners.
    pub fn as_ptr(&self) -> NonNull<u8> {
        beyond(self.slab.base(), self.start * self.dtype.size())
    }
}

pub(crate) fn bytes(len: usize, dtype: DType) -> Result<usize, Error> {
    let bytes = len.checked_mul(dtype.size()).filter(|&bytes| isize::try_from(bytes).is_ok());
    bytes.ok_or(Error::TooLarge { len, dtype })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counting(len: usize) -> (Meter, Buffer) {
        let meter = Meter::new();
        let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
        let buffer = Buffer::from_slice(&values, &meter, Category::Params).unwrap();
        (meter, buffer)
    }

    #[test]
    fn bytes_are_counted_until_the_last_part_is_gone() {
        let (meter, mut left) = counting(100);
        let right = left.split_off(30).unwrap();
        assert_eq!((left.len(), right.len()), (30, 70));
        drop(left);
        assert_eq!(meter.live(Category::Params), 400);
        drop(right);
        assert_eq!((meter.live(Category::Params), meter.peak(Category::Params)), (0, 400));
    }

    #[test]
    fn taking_leaves_an_empty_range_that_joins_again() {
        let (_m, mut a) = counting(5);
        let taken = a.take();
        assert_eq!((a.len(), taken.len()), (0, 5));
        assert_eq!(a.join(taken).unwrap().typed::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn strangers_do_not_join() {
        let (_m, a) = counting(4);
        let (_n, b) = counting(4);
        let (a, b) = a.join(b).unwrap_err();
        assert_eq!((a.len(), b.len()), (4, 4));
        let mut first = a;
        let last = first.split_off(3).unwrap();
        let middle = first.split_off(1).unwrap();
        assert!(first.join(last).is_err(), "a hole between them");
        drop(middle);
    }

    #[test]
    fn a_split_past_the_end_or_a_wrong_type_changes_nothing() {
        let (_m, mut a) = counting(4);
        assert_eq!(a.split_off(5).unwrap_err(), Error::OutOfBounds { start: 5, end: 4, len: 4 });
        let wrong = Error::WrongDType { asked: DType::F64, holds: DType::F32 };
        assert_eq!(a.typed::<f64>().unwrap_err(), wrong);
        assert_eq!(a.typed::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0]);
    }

    #[test]
    fn a_size_past_the_address_space_is_an_error() {
        let refused = Buffer::zeroed(usize::MAX / 4, DType::F64, &Meter::new(), Category::Params);
        assert!(matches!(refused, Err(Error::TooLarge { dtype: DType::F64, .. })));
    }

    proptest! {
        #[test]
        fn any_cuts_join_back_to_the_whole(len in 0usize..200, cuts in prop::collection::vec(0usize..200, 0..8)) {
            let (_m, mut rest) = counting(len);
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|&c| c <= len).collect();
            cuts.sort_by(|a, b| b.cmp(a));
            let mut parts: Vec<Buffer> = cuts.iter().map(|&c| rest.split_off(c).unwrap()).collect();
            for part in &mut parts {
                part.typed_mut::<f32>().unwrap().iter_mut().for_each(|x| *x += 1.0);
            }
            let first = cuts.last().copied().unwrap_or(len);
            while let Some(part) = parts.pop() {
                rest = rest.join(part).unwrap();
            }
            let expected: Vec<f32> = (0..len).map(|i| if i < first { i as f32 } else { i as f32 + 1.0 }).collect();
            prop_assert_eq!(rest.typed::<f32>().unwrap(), &expected[..]);
        }
    }
}
