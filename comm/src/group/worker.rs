//! Execution of a rank's operations: in order, one at a time, by a thread that waits for one or else by the communication thread.

use super::lane::{Lane, Task, TaskStage};
use super::seat::{Begun, Ended, RankSeat};
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
}

impl<S: RankSeat> RankWorker<S> {
    pub(crate) fn new(seat: S, faults: Faults) -> Arc<Self> {
        let lane = Lane::new(seat.rank(), seat.world_size(), seat.clock());
        Arc::new(RankWorker { seat, lane, faults, segments: Mutex::default() })
    }

    /// Body of the communication thread: runs until the rank has left and all its started operations are done.
    pub(crate) fn run(&self) {
        while let Some(task) = self.lane.next() {
            self.carry_out(&task);
        }
        self.seat.depart(self.lane.started());
    }

    /// Runs an operation from start to end on the caller's thread.
    pub(crate) fn complete(&self, op: Op, buffer: Buffer) -> (Buffer, Result<(), Error>, Ended<S>) {
        self.complete_with(op, (buffer, None))
    }

    fn complete_with(
        &self,
        op: Op,
        memory: (Buffer, Option<LentValues>),
    ) -> (Buffer, Result<(), Error>, Ended<S>) {
        match self.lane.enqueue(op, memory) {
            Ok((ticket, task)) => {
                if let Some(task) = task {
                    self.begin(&task);
                }
                self.collect(ticket)
            }
            Err((buffer, error)) => (buffer, Err(error), Ended::default()),
        }
    }

    /// Starts an operation, and begins it if all earlier ones have begun.
    pub(crate) fn start(&self, op: Op, buffer: Buffer) -> Result<usize, (Buffer, Error)> {
        let (ticket, task) = self.lane.enqueue(op, (buffer, None))?;
        let begun = task.map_or(Begun::Not, |task| self.begin(&task));
        if begun != (Begun::Posted { carried: true }) {
            self.lane.want(ticket);
        }
        Ok(ticket)
    }

    fn begin(&self, task: &Task<S::Memory>) -> Begun {
        let RankWorker { seat, faults, lane, .. } = self;
        let faulty = faults.at(seat.rank(), task.called.op_number).next().is_some();
        // SAFETY: the lane holds the task's buffer until `finish`.
        let begun = if faulty { Begun::Not } else { unsafe { seat.begin(task.called, task.memory) } };
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
        let (kept, result, ended) = self.complete_with(op, (kept, LentValues::of(&segments)));
        std::mem::forget(borrowed);
        *self.segments.lock() = segments;
        (kept, result.map(|()| ended.non_finite))
    }

    fn collect(&self, ticket: usize) -> (Buffer, Result<(), Error>, Ended<S>) {
        self.lane.collect(ticket, |task| self.carry_out(task))
    }

    fn carry_out(&self, task: &Task<S::Memory>) {
        let result = self.perform(task);
        self.lane.finish(task, result);
    }

    fn deadline(&self, task: &Task<S::Memory>) -> Duration {
        task.op.deadline().unwrap_or(self.seat.timeout())
    }

    fn perform(&self, task: &Task<S::Memory>) -> Result<Ended<S>, Arc<Error>> {
        let RankWorker { seat, faults, .. } = self;
        let after = self.deadline(task);
        for fault in faults.at(seat.rank(), task.called.op_number) {
            match fault {
                Fault::Delay(by) => seat.pause(seat.clock().now().saturating_add(by))?,
                // SAFETY: the task is this rank's, and its operation has not been posted.
                Fault::CorruptInput => unsafe { S::flip_a_bit(task.memory) },
                Fault::Drop => {
                    seat.pause(seat.clock().now().saturating_add(after))?;
                    return Err(seat.miss(task.called, after));
                }
                Fault::CorruptResult => {}
            }
        }
        // SAFETY: the lane holds the task's buffer until `finish`, and a caller that lends values waits for that (`keep`).
        let ended = unsafe { seat.run(task.called, task.memory, after, task.stage == TaskStage::Posted) }?;
        if faults.at(seat.rank(), task.called.op_number).any(|fault| fault == Fault::CorruptResult) {
            // SAFETY: the task is this rank's, and all ranks have left its operation.
            unsafe { S::flip_a_bit(task.memory) };
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
        self.lane.is_done(ticket, is_ready, |task| self.carry_out(task))
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
