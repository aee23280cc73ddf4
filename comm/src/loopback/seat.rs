//! Loopback as a backend: a rank's place at the meeting point of its group.

use super::meeting::{MeetingGroup, MeetingSeat, Posted};
use super::moves;
use super::shared::{View, exchange};
use crate::group::seat::{Begun, Ended, RankSeat};
use crate::group::segments::LentValues;
use crate::sync::Mutex;
use crate::{Action, Called, Clock, Error};
use meshstep_tensor::Buffer;
use std::sync::Arc;
use std::time::Duration;

/// A rank's seat in a group of threads of this process.
#[derive(Debug)]
pub(super) struct LoopbackSeat {
    seat: MeetingSeat,
    /// Buffers of the running operation; kept, so that an operation does not allocate.
    views: Mutex<Vec<View>>,
}

impl LoopbackSeat {
    pub(super) fn new(group: Arc<MeetingGroup>, rank: usize) -> Self {
        let views = Mutex::new(Vec::with_capacity(group.world_size()));
        LoopbackSeat { seat: MeetingSeat { group, rank }, views }
    }
}

impl LoopbackSeat {
    /// Ends an operation that has been posted.
    fn end(
        &self,
        called: Called,
        len: usize,
        after: Duration,
        deadline: Duration,
    ) -> Result<Ended<Self>, Arc<Error>> {
        // Operations run one at a time, so this lock has no contention.
        let views = &mut self.views.lock();
        let ended = exchange(&self.seat, (called, len), (after, deadline), views, moves::perform)?;
        let formed = ended.formed.map(|MeetingSeat { group, rank }| LoopbackSeat::new(group, rank));
        Ok(Ended { formed, non_finite: ended.non_finite })
    }
}

impl RankSeat for LoopbackSeat {
    type Memory = View;
    const LENDS: bool = true;

    fn rank(&self) -> usize {
        self.seat.rank
    }

    fn world_size(&self) -> usize {
        self.seat.group.world_size()
    }

    fn clock(&self) -> &Clock {
        self.seat.group.clock()
    }

    fn timeout(&self) -> Duration {
        self.seat.group.timeout()
    }

    fn memory(buffer: &Buffer, action: Action, lent: Option<LentValues>) -> View {
        View::of(buffer, action, lent)
    }

    unsafe fn begin(&self, called: Called, view: View, after: Duration) -> Begun<Self> {
        let MeetingSeat { group, rank } = &self.seat;
        match group.post(*rank, called, view, after) {
            Err(error) => Begun::Ended(Err(error)),
            Ok(Posted { ends_here: false, carried, deadline }) => Begun::Posted { deadline, carried },
            Ok(posted) => Begun::Ended(self.end(called, view.len(), after, posted.deadline)),
        }
    }

    fn is_ready(&self, deadline: Duration) -> bool {
        self.seat.group.is_ready(self.seat.rank, deadline)
    }

    unsafe fn run(
        &self,
        called: Called,
        view: View,
        after: Duration,
        posted: Option<Duration>,
    ) -> Result<Ended<Self>, Arc<Error>> {
        let deadline = match posted {
            Some(deadline) => deadline,
            None => self.seat.group.post(self.seat.rank, called, view, after)?.deadline,
        };
        self.end(called, view.len(), after, deadline)
    }

    fn pause(&self, until: Duration) -> Result<(), Arc<Error>> {
        self.seat.group.pause(until)
    }

    fn miss(&self, called: Called, after: Duration) -> Arc<Error> {
        self.seat.group.miss(self.seat.rank, called, after)
    }

    unsafe fn flip_a_bit(view: View) {
        // SAFETY: the caller's promise.
        unsafe { view.flip_a_bit() }
    }

    fn fail(&self, error: Error) {
        self.seat.group.fail(error);
    }

    fn abort(&self) {
        self.seat.group.abort(&Error::Aborted { rank: self.seat.rank });
    }

    fn depart(&self, op_number: u64) {
        self.seat.group.depart(self.seat.rank, op_number);
    }
}
