//! Communicator handle of a rank, and its drop.

use super::chunk_writer::{ChunkWriter, has_parts, is_long};
use super::seat::{Besides, RankSeat};
use super::thread_end::ThreadEnd;
use super::worker::RankWorker;
use crate::communicator::{keeping, nothing, writing};
use crate::group::faults::Faults;
use crate::sync::{self, Mutex};
use crate::{
    Action, Communicator, Error, InFlight, Op, ReduceObserver, Reduction, Stats, WriteChunk, WriteReduced,
};
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue, SliceMut};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard as StdGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// Communicator of a rank: its place in one group.
#[derive(Debug)]
pub(crate) struct GroupRank<S: RankSeat> {
    place: Arc<RankWorker<S>>,
    life: Arc<Life<S>>,
    /// End of the communication thread.
    thread: Arc<ThreadEnd>,
}

/// All groups of a rank: the world and the groups split from it.
#[derive(Debug)]
pub(crate) struct Life<S: RankSeat> {
    places: Mutex<Vec<Arc<RankWorker<S>>>>,
    /// Thread with a panic handler (`spawn`), which reports a panic with its message after unwinding. This is not one of `sync`'s
    /// locks: it is taken while unwinding, where a simulated thread must not be interrupted.
    watched: StdMutex<Option<ThreadId>>,
}

/// Reason for a rank's end.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Left,
    Panicked(String),
}

impl<S: RankSeat> GroupRank<S> {
    /// Takes `seat` and starts its communication thread.
    pub(crate) fn new(seat: S, life: Arc<Life<S>>, faults: Faults) -> Result<Self, Error> {
        let rank = seat.rank();
        let place = RankWorker::new(seat, faults);
        let worker = Arc::clone(&place);
        let name = format!("meshstep-comm-{rank}");
        let (thread, guard) = ThreadEnd::pair();
        let run = move || {
            let _guard = guard;
            worker.run();
            // Before the guard: the thread must not be the last owner of the seat.
            drop(worker);
        };
        if let Err(error) = sync::spawn(name, run) {
            let error = Error::NoThread { rank, message: error.to_string() };
            place.seat.fail(error.clone());
            return Err(error);
        }
        life.places.lock().push(Arc::clone(&place));
        Ok(GroupRank { place, life, thread })
    }

    pub(crate) fn life(&self) -> Arc<Life<S>> {
        Arc::clone(&self.life)
    }
}

impl<S: RankSeat> RankWorker<S> {
    fn end(&self, how: End) {
        if let End::Panicked(message) = how {
            self.seat.fail(Error::Panicked { rank: self.seat.rank(), message });
        }
        self.lane.close();
    }
}

impl<S: RankSeat> Default for Life<S> {
    fn default() -> Self {
        Life { places: Mutex::new(Vec::new()), watched: StdMutex::new(None) }
    }
}

impl<S: RankSeat> Life<S> {
    /// Leaves the report of a panic of this thread to the caller, which gets its message after unwinding.
    pub(crate) fn watch(&self) {
        *self.watched() = Some(thread::current().id());
    }

    /// Ends the rank's membership in all its groups.
    pub(crate) fn end(&self, how: &End) {
        *self.watched() = None;
        let places = std::mem::take(&mut *self.places.lock());
        places.iter().for_each(|place| place.end(how.clone()));
        places.iter().for_each(|place| place.seat.await_departure());
    }

    fn forget(&self, place: &Arc<RankWorker<S>>) {
        self.places.lock().retain(|other| !Arc::ptr_eq(other, place));
    }

    /// Returns the watched thread, also after a panic (decision 119): it is one value.
    fn watched(&self) -> StdGuard<'_, Option<ThreadId>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: RankSeat> Drop for GroupRank<S> {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.place.end(End::Left);
            self.place.seat.await_departure();
        } else if *self.life.watched() == Some(thread::current().id()) {
            return;
        } else {
            self.place.end(End::Panicked("its communicator was dropped while its thread unwound".to_owned()));
        }
        self.life.forget(&self.place);
        // Others may read the report of a panic after this thread has ended: only a backend that has to end first holds it up.
        let wait = self.place.seat.drop_wait();
        if !thread::panicking() || wait == Duration::MAX {
            self.thread.wait(wait);
        }
    }
}

impl<S: RankSeat> Communicator for GroupRank<S> {
    fn rank(&self) -> usize {
        self.place.seat.rank()
    }

    fn world_size(&self) -> usize {
        self.place.seat.world_size()
    }

    fn start(&self, op: Op, buffer: Buffer, _after: &Queue) -> Result<InFlight, (Buffer, Error)> {
        let ticket = self.place.start(op, (buffer, Besides::Nothing))?;
        Ok(InFlight::new(Arc::clone(&self.place) as _, ticket))
    }

    fn start_observed(
        &self,
        op: Op,
        buffer: Buffer,
        _after: &Queue,
        observer: Arc<dyn ReduceObserver>,
    ) -> Result<InFlight, (Buffer, Error)> {
        let ticket = self.place.start(op, (buffer, Besides::Observer(&observer)))?;
        Ok(InFlight::new(Arc::clone(&self.place) as _, ticket))
    }

    fn complete(&self, op: Op, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        let (buffer, result, _) = self.place.complete(op, buffer);
        (buffer, result)
    }

    fn all_reduce_keeping(
        &self,
        reduction: Reduction,
        within: Option<Duration>,
        values: &mut [SliceMut<'_>],
        kept: Buffer,
    ) -> (Buffer, Result<u64, Error>) {
        let op = Op::all_reduce(reduction);
        let op = within.map_or(op, |within| op.within(within));
        if S::LENDS {
            self.place.keep(op, values, kept)
        } else {
            keeping::through_a_copy(self, op, values, kept)
        }
    }

    fn all_gather_written(
        &self,
        buffer: Buffer,
        on: &Queue,
        write: &mut WriteChunk<'_>,
    ) -> (Buffer, Result<(), Error>) {
        let of = (self.rank(), self.world_size());
        if buffer.place() != Place::Cpu || !has_parts(buffer.len(), of.1, on.threads()) {
            return writing::before_gather(self, buffer, on, write);
        }
        // SAFETY: the buffer moves into the rank's queue and comes back from `gather_written`, alive meanwhile. The backend leaves elements
        // of this rank's chunk alone that the writer has not written.
        let mut writer = unsafe { ChunkWriter::new(&buffer, of, on.threads(), write) };
        let gathered = self.place.gather_written(Op::all_gather(), buffer, &mut writer);
        writer.end();
        gathered
    }

    fn reduce_and_gather(
        &self,
        reduction: Reduction,
        (from, into): (&mut Buffer, Buffer),
        on: &Queue,
        write: &mut WriteReduced<'_>,
    ) -> (Buffer, Result<(), Error>) {
        if !self.reduces_in_one_pass(from, &into) {
            return writing::reduce_before_gather(self, reduction, (from, into), on, write);
        }
        let (op, of) = (Op::of(Action::ReduceAndGather(reduction)), (self.rank(), self.world_size()));
        let mut scratch = std::mem::take(&mut *self.place.scratch.lock());
        // SAFETY: as in `all_gather_written`.
        let mut writer =
            unsafe { ChunkWriter::reducing(&into, (from, &mut scratch), of, on.threads(), write) };
        let gathered = self.place.gather_written(op, into, &mut writer);
        writer.end();
        *self.place.scratch.lock() = scratch;
        gathered
    }

    fn reduces_in_one_pass(&self, from: &Buffer, into: &Buffer) -> bool {
        let (len, n, seat) = (into.len(), self.world_size(), &self.place.seat);
        let alike = (from.len(), from.dtype(), from.place()) == (len, into.dtype(), Place::Cpu);
        let long = alike && into.place() == Place::Cpu && len.is_multiple_of(n) && is_long(len, n);
        long && [from, into].into_iter().all(|buffer| seat.gathers_while_written(buffer))
    }

    fn gathers_while_written(&self, buffer: &Buffer, on: &Queue) -> bool {
        let parts = has_parts(buffer.len(), self.world_size(), on.threads());
        parts && buffer.place() == Place::Cpu && self.place.seat.gathers_while_written(buffer)
    }

    fn reduces_pairwise(&self) -> bool {
        true
    }

    fn zeroed_on(
        &self,
        queue: &Queue,
        len: usize,
        dtype: DType,
        (meter, category): (&Meter, Category),
        apart: &[usize],
    ) -> Result<Buffer, meshstep_tensor::Error> {
        match queue.place() {
            Place::Cpu => {
                let own = self.place.seat.zeroed(len, dtype, (meter, category), apart);
                own.unwrap_or_else(|| Buffer::zeroed_apart(len, dtype, meter, category, apart))
            }
            Place::Cuda(_) => Buffer::zeroed_on(queue, len, dtype, meter, category),
        }
    }

    fn register(&self, buffer: &Buffer) -> Result<bool, Error> {
        self.place.seat.register(self, buffer)
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let op = Op::of(Action::Split { color, key });
        let (_, result, ended) = self.place.complete(op, nothing()?);
        result?;
        let Some(seat) = ended.formed else { return Ok(None) };
        Ok(Some(Arc::new(GroupRank::new(seat, self.life(), Faults::none())?)))
    }

    fn abort(&self) {
        self.place.seat.abort();
    }

    fn sound(&self) -> Result<(), Error> {
        self.place.seat.sound()
    }

    fn stats(&self) -> Stats {
        self.place.lane.stats()
    }
}
