//! Execution of a rank's operations: in order, one at a time, by a thread that waits for one or else by the communication thread.

use super::chunk_writer::{ChunkWriter, Scratch};
use super::lane::{Lane, Task, TaskStage};
use super::seat::{Begun, Besides, Ended, RankSeat};
use super::segments::{LentValues, Segment, lay_end_to_end};
use crate::communicator::in_flight::Tickets;
use crate::communicator::keeping;
use crate::group::faults::{Fault, Faults};
use crate::sync::Mutex;
use crate::{Error, Op};
use meshstep_tensor::{Buffer, Queue, SliceMut};
use std::sync::Arc;
use std::time::Duration;

/// One rank's side of a group.
#[derive(Debug)]
pub(crate) struct RankWorker<S: RankSeat> {
    pub(crate) seat: S,
    pub(crate) lane: Arc<Lane<S>>,
    faults: Faults,
    /// Memory for the segments of lent values; kept, so that an operation does not allocate.
    segments: Mutex<Vec<Segment>>,
    /// Memory for reduced parts of a chunk, kept likewise.
    pub(crate) scratch: Mutex<Scratch>,
}

impl<S: RankSeat> RankWorker<S> {
    pub(crate) fn new(seat: S, faults: Faults) -> Arc<Self> {
        let lane = Lane::new(seat.rank(), seat.world_size(), seat.clock());
        Arc::new(RankWorker { seat, lane, faults, segments: Mutex::default(), scratch: Mutex::default() })
    }

    /// Body of the communication thread: runs until the rank has left and all its started operations are done.
    pub(crate) fn run(&self) {
        while let Some(task) = self.lane.next() {
            self.carry_out(&task, None);
        }
        self.seat.depart(self.lane.started());
    }

    /// Runs an operation from start to end on the caller's thread.
    pub(crate) fn complete(&self, op: Op, buffer: Buffer) -> (Buffer, Result<(), Error>, Ended<S>) {
        self.complete_with(op, (buffer, Besides::Nothing), None)
    }

    /// Runs `op`, a gather in which `writer` writes this rank's chunk of the buffer.
    pub(crate) fn gather_written(
        &self,
        op: Op,
        buffer: Buffer,
        writer: &mut ChunkWriter<'_>,
    ) -> (Buffer, Result<(), Error>) {
        let memory = (buffer, Besides::Writer(writer.source()));
        // Other ranks access the source until `complete_with` returns.
        let borrowed = AbortOnUnwind;
        let (buffer, result, _) = self.complete_with(op, memory, Some(writer));
        std::mem::forget(borrowed);
        // A refused operation: the caller's chunk is written nevertheless.
        writer.finish();
        (buffer, result)
    }

    fn complete_with(
        &self,
        op: Op,
        memory: (Buffer, Besides<'_>),
        mut writer: Option<&mut ChunkWriter<'_>>,
    ) -> (Buffer, Result<(), Error>, Ended<S>) {
        match self.lane.enqueue(op, memory) {
            Ok((ticket, task)) => {
                if let Some(task) = task {
                    self.begin(&task);
                }
                self.lane.collect(ticket, |task| self.carry_out(task, writer.as_deref_mut()))
            }
            Err((buffer, error)) => (buffer, Err(error), Ended::default()),
        }
    }

    /// Starts an operation, and begins it if all earlier ones have begun.
    pub(crate) fn start(&self, op: Op, memory: (Buffer, Besides<'_>)) -> Result<usize, (Buffer, Error)> {
        let (ticket, task) = self.lane.enqueue(op, memory)?;
        let begun = task.map_or(Begun::Not, |task| self.begin(&task));
        if begun != (Begun::Posted { carried: true }) {
            self.lane.want(ticket);
        }
        Ok(ticket)
    }

    fn begin(&self, task: &Task<S::Memory>) -> Begun {
        let RankWorker { seat, faults, lane, .. } = self;
        let faulty = faults.at(seat.rank(), task.called.op_number).next().is_some();
        let memory = Self::memory(task, faulty);
        // SAFETY: the lane holds the task's buffer until `finish`.
        let begun = if faulty { Begun::Not } else { unsafe { seat.begin(task.called, memory) } };
        lane.begun(task, begun != Begun::Not);
        begun
    }

    /// Reduces `values` in place by `op`, an all-reduce, and keeps the former ones; returns the non-finite elements of the result.
    pub(crate) fn keep(
        &self,
        op: Op,
        values: &mut [SliceMut<'_>],
        kept: Buffer,
    ) -> (Buffer, Result<u64, Error>) {
        // Another thread's call at the same time has a list of its own.
        let mut segments = std::mem::take(&mut *self.segments.lock());
        let laid = keeping::check(values, &kept).and_then(|()| Ok(lay_end_to_end(values, &mut segments)?));
        if let Err(error) = laid {
            return (kept, Err(error));
        }
        // Other ranks access the values and the list until `complete_with` returns, which it does when the operation has ended.
        let borrowed = AbortOnUnwind;
        let besides = LentValues::of(&segments).map_or(Besides::Nothing, Besides::Lent);
        let (kept, result, ended) = self.complete_with(op, (kept, besides), None);
        std::mem::forget(borrowed);
        *self.segments.lock() = segments;
        (kept, result.map(|()| ended.non_finite))
    }

    fn collect(&self, ticket: usize) -> (Buffer, Result<(), Error>, Ended<S>) {
        self.lane.collect(ticket, |task| self.carry_out(task, None))
    }

    /// Runs an operation; `writer` writes the chunk if the operation is its own.
    fn carry_out(&self, task: &Task<S::Memory>, writer: Option<&mut ChunkWriter<'_>>) {
        let mut writer = writer.filter(|_| task.own);
        let result = self.perform(task, writer.as_deref_mut());
        // The lane holds the buffer until then.
        writer.into_iter().for_each(ChunkWriter::finish);
        self.lane.finish(task, result);
    }

    /// Fails the group because of a part of a chunk.
    fn fail_written(&self, error: &Error) -> Arc<Error> {
        match error {
            Error::Aborted { .. } => self.seat.abort(),
            _ => self.seat.fail(error.clone()),
        }
        Arc::new(error.clone())
    }

    fn deadline(&self, task: &Task<S::Memory>) -> Duration {
        task.op.deadline().unwrap_or(self.seat.timeout())
    }

    /// Returns the memory of an operation with its observer, unless a fault corrupts what that would see.
    fn memory(task: &Task<S::Memory>, faulty: bool) -> S::Memory {
        let observer = task.observer.filter(|_| !faulty);
        observer.map_or(task.memory, |observer| S::observed(task.memory, observer))
    }

    fn perform(
        &self,
        task: &Task<S::Memory>,
        writer: Option<&mut ChunkWriter<'_>>,
    ) -> Result<Ended<S>, Arc<Error>> {
        let RankWorker { seat, faults, .. } = self;
        let (after, mut writer) = (self.deadline(task), writer);
        let faulty = faults.at(seat.rank(), task.called.op_number).next().is_some();
        if let Some(writer) = writer.take_if(|writer| faulty && writer.source().is_none()) {
            writer.finish();
            writer.failure().map_or(Ok(()), |error| Err(self.fail_written(error)))?;
        }
        for fault in faults.at(seat.rank(), task.called.op_number) {
            match fault {
                Fault::Delay(by) => seat.pause(seat.clock().now().saturating_add(by))?,
                // SAFETY: the task is this rank's, and its operation has not been posted.
                Fault::CorruptInput => unsafe { S::flip_a_bit(task.memory, true) },
                Fault::Drop => {
                    seat.pause(seat.clock().now().saturating_add(after))?;
                    return Err(seat.miss(task.called, after));
                }
                Fault::CorruptResult => {}
            }
        }
        // SAFETY: the lane holds the task's buffer until `finish`, and a caller that lends values waits for that (`keep`).
        let ended = unsafe {
            let (memory, posted) = (Self::memory(task, faulty), task.stage == TaskStage::Posted);
            seat.run(task.called, memory, after, posted, writer)
        }?;
        if faults.at(seat.rank(), task.called.op_number).any(|fault| fault == Fault::CorruptResult) {
            // SAFETY: the task is this rank's, and all ranks have left its operation.
            unsafe { S::flip_a_bit(task.memory, false) };
        }
        Ok(ended)
    }
}

impl<S: RankSeat> Tickets for RankWorker<S> {
    fn redeem(&self, ticket: usize, _on: &Queue) -> (Buffer, Result<(), Error>) {
        let (buffer, result, _) = self.collect(ticket);
        (buffer, result)
    }

    fn is_done(&self, ticket: usize) -> bool {
        let is_ready = |task: &Task<S::Memory>| self.seat.is_ready(self.deadline(task));
        self.lane.is_done(ticket, is_ready, |task| self.carry_out(task, None))
    }

    fn ends_within(&self, ticket: usize, patience: Duration) -> bool {
        self.lane.ends_within(ticket, patience)
    }

    fn forget(&self, ticket: usize) {
        self.lane.forget(ticket);
    }
}

/// Ends the process if it is dropped, which happens only if a bug of this crate unwinds: values that a caller lends would be released
/// while other ranks access them. A simulated thread unwinds only when no other will run again.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        if !cfg!(feature = "shuttle") {
            std::process::abort();
        }
    }
}
