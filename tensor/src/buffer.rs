//! Exclusive owner of a range of flat memory.

use crate::memory::Slab;
use crate::slice::beyond;
use crate::{Category, DType, Element, Error, Meter, Place, Queue, Slice, SliceMut};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

/// Owner of a range of one allocation, with one [`DType`].
///
/// A buffer splits in two and joins again without copying, so that parts of one allocation (buckets of gradients, a parameter's
/// range in a bucket) move between owners while the memory stays flat. The memory is released and no longer counted when the last
/// part is dropped.
#[derive(Debug)]
pub struct Buffer {
    slab: Arc<Slab>,
    /// First element, from the slab's base.
    start: usize,
    len: usize,
    dtype: DType,
}

impl Buffer {
    /// Allocates `len` zeros of `dtype`, counted under `category`, aligned to at least 64 bytes.
    pub fn zeroed(len: usize, dtype: DType, meter: &Meter, category: Category) -> Result<Self, Error> {
        Self::zeroed_apart(len, dtype, meter, category, &[])
    }

    /// Like [`zeroed`](Self::zeroed), at an address that modulo 4096 differs from those of `apart` (up to fifteen). For buffers
    /// that are streamed together: the store buffer would otherwise confuse their addresses. Buffers below a page keep no
    /// distance.
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

    /// Allocates `len` zeros of `dtype` at `queue`'s place, counted under `category`. They are zero for work enqueued on `queue`
    /// after this call.
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

    /// Wraps memory of the CPU that other code has allocated: `len` elements from `base` on.
    ///
    /// `keep` lives until the last part of the buffer is dropped. No [`Meter`] counts the memory; to have it counted, put a
    /// [`claim`](Meter::claim) into `keep`.
    ///
    /// # Errors
    /// [`Error::Misaligned`] if `base` is not a multiple of the element's size, and [`Error::TooLarge`].
    ///
    /// # Safety
    /// - The `len` elements are initialised and live as long as `keep` does.
    /// - Until the buffer is dropped, other code accesses the memory only through what the buffer lends.
    pub unsafe fn from_raw(
        base: NonNull<u8>,
        len: usize,
        dtype: DType,
        keep: impl Any + Send + Sync,
    ) -> Result<Self, Error> {
        bytes(len, dtype)?;
        let address = base.addr().get();
        if !address.is_multiple_of(dtype.size()) {
            return Err(Error::Misaligned { address, dtype });
        }
        Ok(Buffer { slab: Arc::new(Slab::lent(base, Box::new(keep))), start: 0, len, dtype })
    }

    /// Returns the first `len` elements of an allocation.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_slab(slab: Slab, len: usize, dtype: DType) -> Self {
        Buffer { slab: Arc::new(slab), start: 0, len, dtype }
    }

    /// Copies `values` into a new buffer, counted under `category`.
    pub fn from_slice<T: Element>(values: &[T], meter: &Meter, category: Category) -> Result<Self, Error> {
        let mut buffer = Self::zeroed(values.len(), T::DTYPE, meter, category)?;
        buffer.typed_mut()?.copy_from_slice(values);
        Ok(buffer)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Place of the memory.
    pub fn place(&self) -> Place {
        self.slab.place()
    }

    /// Size of this range in bytes.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Borrows the range to read.
    pub fn as_slice(&self) -> Slice<'_> {
        // SAFETY: the range lies within the slab, and its bytes are initialised; this buffer alone owns the range, and the borrow
        // of `self` excludes writers for as long as the slice lives.
        unsafe { Slice::from_parts(self.as_ptr(), self.bytes(), self.dtype, self.place()) }
    }

    /// Borrows the range to read and write.
    pub fn as_mut(&mut self) -> SliceMut<'_> {
        // SAFETY: as in `as_slice`; the borrow is exclusive, so this is the only access to the range meanwhile.
        unsafe { SliceMut::from_parts(self.as_ptr(), self.bytes(), self.dtype, self.place()) }
    }

    /// Returns the elements as `T`, or an error with both types.
    pub fn typed<T: Element>(&self) -> Result<&[T], Error> {
        self.as_slice().typed()
    }

    /// Returns the elements as `T`, mutably, or an error with both types.
    pub fn typed_mut<T: Element>(&mut self) -> Result<&mut [T], Error> {
        self.as_mut().into_typed()
    }

    /// Keeps elements `..at` and returns the owner of `at..`.
    pub fn split_off(&mut self, at: usize) -> Result<Buffer, Error> {
        let len = self.len.checked_sub(at).ok_or(Error::bounds(at..self.len, self.len))?;
        self.len = at;
        Ok(Buffer { slab: Arc::clone(&self.slab), start: self.start + at, len, dtype: self.dtype })
    }

    /// Takes all elements; this buffer keeps an empty range at its start.
    pub fn take(&mut self) -> Buffer {
        let len = std::mem::take(&mut self.len);
        Buffer { slab: Arc::clone(&self.slab), start: self.start, len, dtype: self.dtype }
    }

    /// Joins both ranges if `next` begins where this one ends in the same allocation; otherwise returns both unchanged.
    pub fn join(mut self, next: Buffer) -> Result<Buffer, (Buffer, Buffer)> {
        let adjacent = self.start + self.len == next.start && self.dtype == next.dtype;
        if !adjacent || !Arc::ptr_eq(&self.slab, &next.slab) {
            return Err((self, next));
        }
        self.len += next.len;
        Ok(self)
    }

    /// Address of the range at its [`place`](Self::place), for backends that move bytes between buffers of several owners.
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
    fn memory_of_other_code_is_used_in_place_and_given_back_once() {
        let mut values = vec![1.0f32, 2.0, 3.0];
        let base = NonNull::new(values.as_mut_ptr()).unwrap().cast::<u8>();
        let keep = Arc::new(values);
        // SAFETY: three initialised elements, which `keep` owns and nobody else accesses meanwhile.
        let mut left = unsafe { Buffer::from_raw(base, 3, DType::F32, Arc::clone(&keep)) }.unwrap();
        let mut right = left.split_off(1).unwrap();
        right.typed_mut::<f32>().unwrap()[0] = 7.0;
        drop(left);
        assert_eq!((Arc::strong_count(&keep), right.typed::<f32>().unwrap()), (2, &[7.0, 3.0][..]));
        drop(right);
        assert_eq!((Arc::strong_count(&keep), &keep[..]), (1, &[1.0, 7.0, 3.0][..]));
        let odd = beyond(base, 1);
        // SAFETY: refused before the memory is used.
        let refused = unsafe { Buffer::from_raw(odd, 1, DType::F32, keep) };
        let address = odd.addr().get();
        assert_eq!(refused.unwrap_err(), Error::Misaligned { address, dtype: DType::F32 });
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
