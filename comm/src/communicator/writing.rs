//! All-gathers of chunks that are written meanwhile, perhaps from reduced values: the defaults of every backend.

use crate::communicator::stats::chunk;
use crate::{Communicator, Error, Op, Reduction};
use meshstep_tensor::{Buffer, Queue, SliceMut};
use std::ops::ControlFlow;

/// Function that writes this rank's chunk part by part ([`Communicator::all_gather_written`]): it gets the index of the part's first
/// element within the chunk, and the part. [`ControlFlow::Break`] aborts the group.
pub type WriteChunk<'w> = dyn FnMut(usize, SliceMut<'_>) -> ControlFlow<()> + 'w;

/// Function that writes this rank's chunk part by part from reduced values ([`Communicator::reduce_and_gather`]): it gets the index of
/// the part's first element within the chunk, the reduced values, which it may overwrite, and the part. [`ControlFlow::Break`] aborts
/// the group.
pub type WriteReduced<'w> = dyn FnMut(usize, SliceMut<'_>, SliceMut<'_>) -> ControlFlow<()> + 'w;

/// Implements [`Communicator::reduce_and_gather`] by a reduce-scatter, and a written all-gather after it.
pub(crate) fn reduce_before_gather<C: Communicator + ?Sized>(
    comm: &C,
    reduction: Reduction,
    (from, into): (&mut Buffer, Buffer),
    on: &Queue,
    write: &mut WriteReduced<'_>,
) -> (Buffer, Result<(), Error>) {
    if let Err(error) = check_alike(from, &into) {
        return (into, Err(error));
    }
    let whole = from.take();
    let (whole, reduced) = match comm.start(Op::reduce_scatter(reduction), whole, on) {
        Ok(started) => started.wait(on),
        Err((whole, error)) => (whole, Err(error)),
    };
    *from = whole;
    if let Err(error) = reduced {
        return (into, Err(error));
    }
    let chunk = chunk(from.len(), comm.world_size(), comm.rank());
    comm.all_gather_written(into, on, &mut |first, part| {
        let start = chunk.start + first;
        match from.as_mut().slice(start..start + part.len()) {
            Ok(values) => write(first, values, part),
            Err(_) => ControlFlow::Break(()),
        }
    })
}

/// Checks that both buffers have one length and type.
fn check_alike(from: &Buffer, into: &Buffer) -> Result<(), Error> {
    if from.dtype() != into.dtype() {
        let (asked, holds) = (into.dtype(), from.dtype());
        return Err(meshstep_tensor::Error::WrongDType { asked, holds }.into());
    }
    if from.len() != into.len() {
        let (given, expected) = (from.len(), into.len());
        return Err(meshstep_tensor::Error::WrongLen { given, expected }.into());
    }
    Ok(())
}

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
