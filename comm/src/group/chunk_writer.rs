//! Chunk of a rank that its caller writes part by part while the chunk is gathered.

use super::threads::message;
use crate::Error;
use crate::communicator::stats::chunk;
use crate::communicator::writing::WriteChunk;
use meshstep_tensor::{Buffer, DType, SliceMut, Threads, bf16, f16};
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;

/// Elements of a part for each thread that writes: with the optimizer's state for them they stay in the cache of a core, and an update
/// of two such parts is worth two threads. The shuttle tests have small buffers.
const PART: usize = if cfg!(feature = "shuttle") { 1 } else { 64 << 10 };

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
    write: &'w mut WriteChunk<'w>,
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
        (rank, world_size): (usize, usize),
        threads: &Threads,
        write: &'w mut WriteChunk<'w>,
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

    /// Writes the next part and returns its elements within the chunk; `None` if nothing is left, or after a failure.
    pub(crate) fn write_next(&mut self) -> Option<Range<usize>> {
        if self.failure.is_some() || self.done == self.chunk.len() {
            return None;
        }
        let range = self.done..self.chunk.len().min(self.done + self.part);
        let ChunkWriter { ref chunk, base, dtype, .. } = *self;
        let first = chunk.start + range.start;
        // SAFETY: by the promise to `new` the memory is alive and these elements, which are not written, are this call's alone. They are
        // within the buffer, which has this type.
        let part = unsafe { elements(base, dtype, first..first + range.len()) };
        let written = match part {
            // A panic reaches the caller when the operation has ended.
            Some(part) => catch_unwind(AssertUnwindSafe(|| (self.write)(range.start, part))),
            None => return self.fail(Error::UnsupportedDType { dtype }),
        };
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

    /// Writes all parts that are left.
    pub(crate) fn finish(&mut self) {
        while self.write_next().is_some() {}
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
