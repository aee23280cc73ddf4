//! All-gathers of chunks that are written meanwhile: the default of every backend.

use crate::communicator::stats::chunk;
use crate::{Communicator, Error, Op};
use meshstep_tensor::{Buffer, Queue, SliceMut};
use std::ops::ControlFlow;

/// Function that writes this rank's chunk part by part ([`Communicator::all_gather_written`]): it gets the index of the part's first
/// element within the chunk, and the part. [`ControlFlow::Break`] aborts the group.
pub type WriteChunk<'w> = dyn FnMut(usize, SliceMut<'_>) -> ControlFlow<()> + 'w;

/// Implements [`Communicator::all_gather_written`] by one call of `write`, and an all-gather after it.
pub(crate) fn before_gather<C: Communicator + ?Sized>(
    comm: &C,
    mut buffer: Buffer,
    on: &Queue,
    write: &mut WriteChunk<'_>,
) -> (Buffer, Result<(), Error>) {
    let chunk = chunk(buffer.len(), comm.world_size(), comm.rank());
    let written = match buffer.as_mut().slice(chunk) {
        Ok(part) if part.is_empty() => ControlFlow::Continue(()),
        Ok(part) => {
            let aborts = AbortOnPanic(comm);
            let written = write(0, part);
            std::mem::forget(aborts);
            written
        }
        Err(error) => return (buffer, Err(error.into())),
    };
    if written.is_break() {
        comm.abort();
        return (buffer, Err(Error::Aborted { rank: comm.rank() }));
    }
    match comm.start(Op::all_gather(), buffer, on) {
        Ok(started) => started.wait(on),
        Err((buffer, error)) => (buffer, Err(error)),
    }
}

/// Aborts the group if it is dropped while a writer unwinds.
struct AbortOnPanic<'c, C: Communicator + ?Sized>(&'c C);

impl<C: Communicator + ?Sized> Drop for AbortOnPanic<'_, C> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
