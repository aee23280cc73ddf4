//! Host words that ranks combine, on a communicator that may have GPU buffers; and uploads of host values.

use meshstep_comm::{Communicator, Error, InFlight, Op, Reduction};
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue, Slice, SliceMut};
use twox_hash::XxHash3_64;

/// Runs `op` on a buffer, ordered by `queue` at both ends.
pub fn run(comm: &dyn Communicator, queue: &Queue, op: Op, buffer: &mut Buffer) -> Result<(), Error> {
    let (whole, result) = match queue.place() {
        // The host waits in any case, so the waiting thread carries the operation out.
        Place::Cpu => comm.complete(op, buffer.take()),
        _ => land(comm.start(op, buffer.take(), queue), queue),
    };
    *buffer = whole;
    result
}

/// Waits for an operation, if it was started.
pub fn land(started: Result<InFlight, (Buffer, Error)>, queue: &Queue) -> (Buffer, Result<(), Error>) {
    match started {
        Ok(flight) => flight.wait(queue),
        Err((buffer, error)) => (buffer, Err(error)),
    }
}

/// Replaces each word by its reduction over all ranks.
pub fn all_reduce(
    comm: &dyn Communicator,
    queue: &Queue,
    meter: &Meter,
    words: &mut [u64],
    reduction: Reduction,
) -> Result<(), Error> {
    travel(comm, queue, meter, words, Op::all_reduce(reduction))
}

/// Replaces each word by its reduction, travelling in the first words of `room` at the queue's place.
pub(crate) fn all_reduce_in(
    comm: &dyn Communicator,
    queue: &Queue,
    room: &mut Buffer,
    words: &mut [u64],
    reduction: Reduction,
) -> Result<(), Error> {
    let rest = room.split_off(words.len())?;
    let travelled = travel_in(comm, queue, room, words, Op::all_reduce(reduction));
    *room = room.take().join(rest).unwrap_or_else(|_| unreachable!("joined where it was cut"));
    travelled
}

/// Replaces chunk `q` of the words by rank `q`'s.
pub(crate) fn all_gather(
    comm: &dyn Communicator,
    queue: &Queue,
    meter: &Meter,
    words: &mut [u64],
) -> Result<(), Error> {
    travel(comm, queue, meter, words, Op::all_gather())
}

fn travel(
    comm: &dyn Communicator,
    queue: &Queue,
    meter: &Meter,
    words: &mut [u64],
    op: Op,
) -> Result<(), Error> {
    let mut buffer = Buffer::zeroed_on(queue, words.len(), DType::U64, meter, Category::Staging)?;
    travel_in(comm, queue, &mut buffer, words, op)
}

fn travel_in(
    comm: &dyn Communicator,
    queue: &Queue,
    buffer: &mut Buffer,
    words: &mut [u64],
    op: Op,
) -> Result<(), Error> {
    queue.upload((&*words).into(), buffer.as_mut())?;
    run(comm, queue, op, buffer)?;
    queue.download(buffer.as_slice(), words.into())?;
    // An aborted operation lets a GPU queue continue, and leaves words that are not the ranks' result.
    comm.sound()
}

/// Sums one vector and maximises the other over all ranks, as one operation, which starts after the work of the first queue; the
/// second queue waits for it.
///
/// # Panics
/// If the second vector does not lie behind the first in one allocation.
pub(crate) fn all_reduce_both(
    comm: &dyn Communicator,
    [before, after]: [&Queue; 2],
    sum: &mut Buffer,
    max: &mut Buffer,
) -> Result<(), Error> {
    let sums = sum.len();
    let op = Op::all_reduce(Reduction::SumThenMax { sums });
    let both = sum.take().join(max.take()).unwrap_or_else(|_| unreachable!("the vectors were cut from one"));
    let (mut both, result) = match before.place() {
        // The host waits in any case, so the waiting thread carries the operation out.
        Place::Cpu => comm.complete(op, both),
        _ => land(comm.start(op, both, before), after),
    };
    *max = both.split_off(sums)?;
    *sum = both;
    result
}

/// Returns a digest of the bytes at the queue's place.
pub fn digest(queue: &Queue, meter: &Meter, memory: Slice<'_>) -> Result<u64, meshstep_tensor::Error> {
    read(queue, meter, memory, |memory| Ok(XxHash3_64::oneshot(memory.bytes()?)))
}

/// Calls `look` with memory of the queue's place, through a host copy if that is not the CPU.
pub fn read<T>(
    queue: &Queue,
    meter: &Meter,
    memory: Slice<'_>,
    look: impl FnOnce(Slice<'_>) -> Result<T, meshstep_tensor::Error>,
) -> Result<T, meshstep_tensor::Error> {
    if queue.place() == Place::Cpu {
        return look(memory);
    }
    let mut host = Buffer::zeroed(memory.len(), memory.dtype(), meter, Category::Staging)?;
    queue.download(memory, host.as_mut())?;
    look(host.as_slice())
}

/// Calls `write` with memory of the queue's place, through a host copy if that is not the CPU.
pub fn fill(
    queue: &Queue,
    meter: &Meter,
    memory: SliceMut<'_>,
    write: impl FnOnce(SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
) -> Result<(), meshstep_tensor::Error> {
    if queue.place() == Place::Cpu {
        return write(memory);
    }
    let mut host = Buffer::zeroed(memory.len(), memory.dtype(), meter, Category::Staging)?;
    write(host.as_mut())?;
    queue.upload(host.as_slice(), memory)
}
