//! Chunk of a rank that its caller writes part by part while the chunk is gathered, perhaps from reduced parts of another buffer.

use super::threads::message;
use crate::Error;
use crate::communicator::stats::chunk;
use crate::communicator::writing::{WriteChunk, WriteReduced};
use crate::group::fold::{FoldInto, Tiles};
use meshstep_tensor::{Buffer, DType, SliceMut, Threads, bf16, f16};
use std::any::Any;
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;

/// Elements of a part for each thread that writes: with the optimizer's state for them they stay in the cache of a core, and an update
/// of two such parts is worth two threads. The shuttle tests have small buffers.
const PART: usize = if cfg!(feature = "shuttle") { 1 } else { 64 << 10 };

/// Address of a buffer whose values are reduced, which its rank's caller keeps alive while the operation runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReduceSource(NonNull<u8>);

// SAFETY: an address; access to its memory has its own safety argument.
unsafe impl Send for ReduceSource {}
// SAFETY: as above.
unsafe impl Sync for ReduceSource {}

impl ReduceSource {
    pub(crate) fn address(self) -> NonNull<u8> {
        self.0
    }
}

/// Memory for a reduced part, kept by a rank, so that an operation does not allocate.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Aligned to every type.
    values: Vec<u64>,
    pub(crate) tiles: Tiles,
}

/// Function that writes the parts.
enum PartWriter<'w> {
    Values(&'w mut WriteChunk<'w>),
    /// Gets the reduced part of the source too.
    Reduced {
        write: &'w mut WriteReduced<'w>,
        source: ReduceSource,
        scratch: &'w mut Scratch,
    },
}

/// Parts of a chunk that are still to be written.
pub(crate) struct ChunkWriter<'w> {
    rank: usize,
    /// Elements of the chunk in the buffer.
    chunk: Range<usize>,
    /// Elements of the chunk that are written.
    done: usize,
    part: usize,
    base: NonNull<u8>,
    dtype: DType,
    write: PartWriter<'w>,
    pub(crate) threads: Threads,
    failure: Option<Error>,
    panic: Option<Box<dyn Any + Send>>,
}

impl<'w> ChunkWriter<'w> {
    /// Prepares to write the chunk of `rank` among `world_size` on these threads.
    ///
    /// # Safety
    /// Until the writer is dropped the buffer's memory is alive, and nothing else accesses elements of the chunk that are not written.
    pub(crate) unsafe fn new(
        buffer: &Buffer,
        of: (usize, usize),
        threads: &Threads,
        write: &'w mut WriteChunk<'w>,
    ) -> Self {
        Self::with(buffer, of, threads, PartWriter::Values(write))
    }

    /// Prepares to write the chunk from the reduced values of `source`, a buffer of the same length and type, part by part in `scratch`.
    ///
    /// # Safety
    /// As for [`new`](ChunkWriter::new).
    pub(crate) unsafe fn reducing(
        buffer: &Buffer,
        (source, scratch): (&'w mut Buffer, &'w mut Scratch),
        of: (usize, usize),
        threads: &Threads,
        write: &'w mut WriteReduced<'w>,
    ) -> Self {
        let words = (part_len(of.1, threads) * buffer.dtype().size()).div_ceil(size_of::<u64>());
        scratch.values.resize(words.max(scratch.values.len()), 0);
        let source = ReduceSource(source.as_ptr());
        Self::with(buffer, of, threads, PartWriter::Reduced { write, source, scratch })
    }

    fn with(
        buffer: &Buffer,
        (rank, world_size): (usize, usize),
        threads: &Threads,
        write: PartWriter<'w>,
    ) -> Self {
        ChunkWriter {
            rank,
            chunk: chunk(buffer.len(), world_size, rank),
            done: 0,
            part: part_len(world_size, threads),
            base: buffer.as_ptr(),
            dtype: buffer.dtype(),
            write,
            threads: threads.clone(),
            failure: None,
            panic: None,
        }
    }

    /// Returns the buffer whose values are reduced, if there is one.
    pub(crate) fn source(&self) -> Option<ReduceSource> {
        if let PartWriter::Reduced { source, .. } = self.write { Some(source) } else { None }
    }

    /// Writes the next part and returns its elements within the chunk; `None` if nothing is left, after a failure, or if parts need
    /// reduced values.
    pub(crate) fn write_next(&mut self) -> Option<Range<usize>> {
        let (range, part) = self.next()?;
        let PartWriter::Values(write) = &mut self.write else { return None };
        let Some(part) = part else { return self.fail(Error::UnsupportedDType { dtype: self.dtype }) };
        // A panic reaches the caller when the operation has ended.
        let written = catch_unwind(AssertUnwindSafe(|| write(range.start, part)));
        self.take(range, written)
    }

    /// Reduces the next part by `reduce`, writes it, and returns its elements within the chunk; `None` if nothing is left, after a
    /// failure, or if `reduce` returns false. `reduce` gets the part's first element in the buffer and the memory for its values.
    ///
    /// # Safety
    /// `reduce` writes values of the buffer's type.
    pub(crate) unsafe fn reduce_next(
        &mut self,
        reduce: impl FnOnce(FoldInto, &mut Tiles) -> bool,
    ) -> Option<Range<usize>> {
        let (range, part) = self.next()?;
        let (first, dtype) = (self.chunk.start + range.start, self.dtype);
        let PartWriter::Reduced { write, scratch, .. } = &mut self.write else { return None };
        let Scratch { values, tiles } = &mut **scratch;
        assert!(range.len() * dtype.size() <= size_of_val(&values[..]), "a part beyond the scratch memory");
        let base = NonNull::from(&mut values[..]).cast();
        if !reduce(FoldInto { base, first, len: range.len(), dtype }, tiles) {
            return None;
        }
        // SAFETY: the scratch memory has room for the part, is borrowed here alone, and any bits are an element.
        let values = unsafe { elements(base, dtype, 0..range.len()) };
        let (Some(values), Some(part)) = (values, part) else {
            return self.fail(Error::UnsupportedDType { dtype });
        };
        let written = catch_unwind(AssertUnwindSafe(|| write(range.start, values, part)));
        self.take(range, written)
    }

    /// Returns the next part: its elements within the chunk, and their memory unless the type does not travel.
    fn next<'p>(&mut self) -> Option<(Range<usize>, Option<SliceMut<'p>>)> {
        if self.failure.is_some() || self.is_written() {
            return None;
        }
        let range = self.done..self.chunk.len().min(self.done + self.part);
        let first = self.chunk.start + range.start;
        // SAFETY: by the promise to the constructor the memory is alive and these elements, which are not written, are this call's alone.
        // They are within the buffer, which has this type.
        let part = unsafe { elements(self.base, self.dtype, first..first + range.len()) };
        Some((range, part))
    }

    /// Notes that a part is written, or why it is not.
    fn take(
        &mut self,
        range: Range<usize>,
        written: std::thread::Result<ControlFlow<()>>,
    ) -> Option<Range<usize>> {
        match written {
            Ok(written) if written.is_continue() => {
                self.done = range.end;
                Some(range)
            }
            Ok(_) => self.fail(Error::Aborted { rank: self.rank }),
            Err(panic) => {
                let message = message(panic.as_ref());
                self.panic = Some(panic);
                self.fail(Error::Panicked { rank: self.rank, message })
            }
        }
    }

    fn fail<T>(&mut self, error: Error) -> Option<T> {
        self.failure = Some(error);
        None
    }

    /// Writes all parts that are left, unless they need reduced values.
    pub(crate) fn finish(&mut self) {
        while self.write_next().is_some() {}
    }

    /// Returns true if all of the chunk is written.
    pub(crate) fn is_written(&self) -> bool {
        self.done == self.chunk.len()
    }

    /// Elements of the chunk.
    pub(crate) fn len(&self) -> usize {
        self.chunk.len()
    }

    /// Returns the failure of a part, after which no further one is written.
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    /// Resumes the panic of a part, if there was one.
    pub(crate) fn end(self) {
        if let Some(panic) = self.panic {
            resume_unwind(panic);
        }
    }
}

/// Returns true if chunks of a buffer of `len` elements are longer than one part.
pub(crate) fn has_parts(len: usize, world_size: usize, threads: &Threads) -> bool {
    world_size > 1 && len / world_size > part_len(world_size, threads)
}

/// Returns true if chunks are longer than one part of one thread: ranks that differ in their threads agree on it.
pub(crate) fn is_long(len: usize, world_size: usize) -> bool {
    world_size > 1 && len / world_size > PART
}

/// Elements of a part. Ranks of one process or host share its processors.
fn part_len(world_size: usize, threads: &Threads) -> usize {
    PART * (threads.count() / world_size).max(1)
}

/// Borrows elements of memory of type `dtype`; `None` for a type that does not travel.
///
/// # Safety
/// The memory of `range` from `base` on is alive, has this type, and nothing else accesses it for as long as the slice is used.
pub(crate) unsafe fn elements<'a>(
    base: NonNull<u8>,
    dtype: DType,
    range: Range<usize>,
) -> Option<SliceMut<'a>> {
    macro_rules! typed {
        ($($dtype:ident: $t:ty),*) => {
            match dtype {
                $(DType::$dtype => {
                    // SAFETY: the caller's promise.
                    let first = unsafe { base.cast::<$t>().add(range.start) };
                    // SAFETY: the caller's promise.
                    let values = unsafe { std::slice::from_raw_parts_mut(first.as_ptr(), range.len()) };
                    Some(values.into())
                })*
                _ => None,
            }
        };
    }
    typed!(F32: f32, F64: f64, BF16: bf16, F16: f16, U64: u64)
}
