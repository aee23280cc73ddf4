//! Loopback as a backend: a rank's place at the meeting point of its group.

use super::meeting::{MeetingGroup, MeetingSeat};
use super::shared::View;
use crate::group::chunk_writer::ChunkWriter;
use crate::group::seat::{Begun, Besides, Ended, RankSeat};
use crate::{Action, Called, Clock, Error};
use meshstep_tensor::Buffer;
use std::sync::Arc;
use std::time::Duration;

/// A rank's seat in a group of threads of this process.
#[derive(Debug)]
pub(super) struct LoopbackSeat {
    seat: MeetingSeat,
}

impl LoopbackSeat {
    pub(super) fn new(group: Arc<MeetingGroup>, rank: usize) -> Self {
        LoopbackSeat { seat: MeetingSeat { group, rank } }
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

    fn memory(buffer: &Buffer, action: Action, besides: Besides<'_>) -> View {
        View::of(buffer, action, besides)
    }

    fn gathers_while_written(&self, _: &Buffer) -> bool {
        true
    }

    unsafe fn begin(&self, called: Called, view: View) -> Begun {
        match self.seat.group.post(self.seat.rank, called, view) {
            Ok(carried) => Begun::Posted { carried },
            // The cause is reported when the operation is carried out.
            Err(_) => Begun::Not,
        }
    }

    fn is_ready(&self, after: Duration) -> bool {
        self.seat.group.is_ready(self.seat.rank, after)
    }

    unsafe fn run(
        &self,
        called: Called,
        view: View,
        after: Duration,
        posted: bool,
        writer: Option<&mut ChunkWriter<'_>>,
    ) -> Result<Ended<Self>, Arc<Error>> {
        let MeetingSeat { group, rank } = &self.seat;
        if !posted {
            let view = if writer.is_some() { view } else { view.with_shared_chunk() };
            group.post(*rank, called, view)?;
        }
        match writer {
            Some(writer) if writer.source().is_some() => group.reduce_chunk(*rank, (called, after), writer),
            Some(writer) => group.write_chunk(*rank, writer),
            None => {}
        }
        let ended = group.collect(*rank, called, after)?;
        let formed = ended.formed.map(|MeetingSeat { group, rank }| LoopbackSeat::new(group, rank));
        Ok(Ended { formed, non_finite: ended.non_finite })
    }

    fn pause(&self, until: Duration) -> Result<(), Arc<Error>> {
        self.seat.group.pause(until)
    }

    fn miss(&self, called: Called, after: Duration) -> Arc<Error> {
        self.seat.group.miss(self.seat.rank, called, after)
    }

    unsafe fn flip_a_bit(view: View, of_input: bool) {
        // SAFETY: the caller's promise.
        unsafe { if of_input { view.input() } else { view }.flip_a_bit() }
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
