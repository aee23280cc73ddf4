//! Memory of an operation, as an address that the engine borrows piece by piece.

use crate::communicator::observing::Observed;
use crate::group::chunk_writer::{ReduceSource, elements};
use crate::group::fold::FoldInto;
use meshstep_tensor::{Buffer, DType};
use std::ops::Range;
use std::ptr::NonNull;

/// Address and size of a buffer. Only the methods below access it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpMemory {
    base: NonNull<u8>,
    len: usize,
    pub(super) dtype: DType,
    /// Observer of the reduced chunk.
    observer: Option<Observed>,
    /// Buffer of the values to reduce, if it is another one of the same length and type.
    pub(super) source: Option<ReduceSource>,
}

// SAFETY: an address and a size; access has its own safety argument.
unsafe impl Send for OpMemory {}

impl OpMemory {
    pub(super) fn of(buffer: &Buffer, source: Option<ReduceSource>) -> Self {
        let (base, len, dtype) = (buffer.as_ptr(), buffer.len(), buffer.dtype());
        OpMemory { base, len, dtype, observer: None, source }
    }

    /// Adds an observer of the reduced chunk.
    pub(super) fn observed_by(self, observer: Observed) -> Self {
        OpMemory { observer: Some(observer), ..self }
    }

    /// Shows bytes `range`, whole elements of this rank's chunk that are reduced, to the observer.
    ///
    /// # Safety
    /// The operation runs, and nothing writes the range meanwhile.
    pub(super) unsafe fn show(&self, range: Range<usize>) {
        let Some(observer) = self.observer else { return };
        assert!(range.start <= range.end && range.end <= self.bytes(), "a range beyond the buffer");
        let size = self.dtype.size();
        let first = range.start / size;
        // SAFETY: the range is within the buffer, which has this type; the caller's promise.
        let values = unsafe { elements(self.base, self.dtype, first..range.end / size) };
        if let Some(values) = values {
            // SAFETY: the caller's promise.
            unsafe { observer.see(first, values.as_slice()) }
        }
    }

    /// Returns bytes `range`, whole elements, as memory for a reduced tile.
    ///
    /// # Panics
    /// If they are not within the buffer.
    pub(super) fn tile(&self, range: Range<usize>) -> FoldInto {
        assert!(range.end <= self.bytes(), "a tile beyond the buffer");
        let (base, size) = (self.address(range.start), self.dtype.size());
        FoldInto { base, first: range.start / size, len: range.len() / size, dtype: self.dtype }
    }

    /// Returns the memory of the operation's input: the source if there is one.
    pub(super) fn input(&self) -> Self {
        self.source.map_or(*self, |source| OpMemory { base: source.address(), source: None, ..*self })
    }

    /// Size in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Returns the address of byte `at`.
    ///
    /// # Panics
    /// If it is beyond the end.
    pub(super) fn address(&self, at: usize) -> NonNull<u8> {
        assert!(at <= self.bytes(), "an address beyond the buffer");
        // SAFETY: the offset is within the buffer's allocation or at its end.
        unsafe { self.base.add(at) }
    }

    /// Borrows bytes `range`.
    ///
    /// # Safety
    /// The operation runs, and nothing writes the range for as long as the slice is used.
    ///
    /// # Panics
    /// If the range is not within the buffer.
    pub(super) unsafe fn slice<'a>(&self, range: Range<usize>) -> &'a [u8] {
        assert!(range.start <= range.end && range.end <= self.bytes(), "a range beyond the buffer");
        // SAFETY: the range is within the buffer, which is alive and initialised while its operation runs; the caller's promise.
        unsafe { std::slice::from_raw_parts(self.address(range.start).as_ptr(), range.len()) }
    }

    /// Borrows bytes `range` to write them.
    ///
    /// # Safety
    /// The operation runs, and nothing else accesses the range for as long as the slice is used.
    ///
    /// # Panics
    /// If the range is not within the buffer.
    pub(super) unsafe fn slice_mut<'a>(&self, range: Range<usize>) -> &'a mut [u8] {
        assert!(range.start <= range.end && range.end <= self.bytes(), "a range beyond the buffer");
        // SAFETY: as in `slice`, and the caller promises that it is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.address(range.start).as_ptr(), range.len()) }
    }
}
