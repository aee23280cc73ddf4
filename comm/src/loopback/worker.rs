//! Execution of a rank's operations: in order, one at a time, by a thread that waits for one or else by the communication thread.

use super::lane::{Lane, Task};
use super::meeting::MeetingSeat;
use super::moves;
use super::shared::{View, exchange};
use crate::faults::{Fault, Faults};
use crate::in_flight::Tickets;
use crate::sync::Mutex;
use crate::{Error, Op};
use meshstep_tensor::{Buffer, Queue};
use std::sync::Arc;
use std::time::Duration;

/// One rank's side of a group.
#[derive(Debug)]
pub(super) struct RankWorker {
    pub(super) seat: MeetingSeat,
    pub(super) lane: Arc<Lane>,
    faults: Faults,
    /// Buffers of the running operation; kept, so that an operation does not allocate.
    views: Mutex<Vec<View>>,
}

impl RankWorker {
    pub(super) fn new(seat: MeetingSeat, faults: Faults) -> Arc<Self> {
        let world_size = seat.group.world_size();
        let lane = Lane::new(seat.rank, world_size, seat.group.clock());
        Arc::new(RankWorker { seat, lane, faults, views: Mutex::new(Vec::with_capacity(world_size)) })
    }

    /// Body of the communication thread: runs until the rank has left and all its started operations are done.
    pub(super) fn run(&self) {
        while let Some(task) = self.lane.next() {
            self.carry_out(&task);
        }
        self.seat.group.depart(self.seat.rank, self.lane.started());
    }

    /// Runs an operation from start to end on the caller's thread.
    pub(super) fn complete(
        &self,
        op: Op,
        buffer: Buffer,
    ) -> (Buffer, Result<(), Error>, Option<MeetingSeat>) {
        match self.lane.enqueue(op, buffer, true) {
            Ok(ticket) => self.collect(ticket),
            Err((buffer, error)) => (buffer, Err(error), None),
        }
    }

    fn collect(&self, ticket: usize) -> (Buffer, Result<(), Error>, Option<MeetingSeat>) {
        self.lane.collect(ticket, |task| self.carry_out(task))
    }

    fn carry_out(&self, task: &Task) {
        let result = self.perform(task);
        self.lane.finish(task, result);
    }

    fn perform(&self, task: &Task) -> Result<Option<MeetingSeat>, Arc<Error>> {
        let RankWorker { seat, lane, faults, views } = self;
        let after = task.op.deadline().unwrap_or(seat.group.timeout());
        for fault in faults.at(seat.rank, task.called.op_number) {
            match fault {
                Fault::Delay(by) => seat.group.pause(seat.group.clock().now().saturating_add(by))?,
                Fault::CorruptInput => lane.with_buffer(task, flip_a_bit),
                Fault::Drop => {
                    seat.group.pause(seat.group.clock().now().saturating_add(after))?;
                    return Err(seat.group.miss(seat.rank, task.called, after));
                }
                Fault::CorruptResult => {}
            }
        }
        // Operations run one at a time, so this lock has no contention.
        let formed = exchange(seat, task.called, task.view, after, &mut views.lock(), moves::perform)?;
        if faults.at(seat.rank, task.called.op_number).any(|fault| fault == Fault::CorruptResult) {
            lane.with_buffer(task, flip_a_bit);
        }
        Ok(formed)
    }
}

impl Tickets for RankWorker {
    fn redeem(&self, ticket: usize, _on: &Queue) -> (Buffer, Result<(), Error>) {
        let (buffer, result, _) = self.collect(ticket);
        (buffer, result)
    }

    fn is_done(&self, ticket: usize) -> bool {
        self.lane.is_done(ticket)
    }

    fn ends_within(&self, ticket: usize, patience: Duration) -> bool {
        self.lane.ends_within(ticket, patience)
    }

    fn forget(&self, ticket: usize) {
        self.lane.forget(ticket);
    }
}

/// Flips a bit in the middle of a buffer, as a faulty link would.
fn flip_a_bit(buffer: &mut Buffer) {
    let middle = buffer.bytes() / 2;
    let mut slice = buffer.as_mut();
    if let Some(byte) = slice.bytes_mut().ok().and_then(|bytes| bytes.get_mut(middle)) {
        *byte ^= 1 << 6;
    }
}
