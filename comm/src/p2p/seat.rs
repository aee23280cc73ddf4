//! Message passing as a backend: a rank's place in a group over a transport.

use super::engine::{Formed, Running};
use super::failure::Stop;
use super::group::{P2pGroup, Parent};
use super::hosts::Hosts;
use super::memory::OpMemory;
use super::transport::Transport;
use super::windows;
use crate::communicator::observing::Observed;
use crate::group::chunk_writer::ChunkWriter;
use crate::group::rank::{GroupRank, Life};
use crate::group::seat::{Begun, Besides, Ended, RankSeat};
use crate::group::verdict::{self, Stand};
use crate::{Action, Called, Clock, Communicator, Error, Faults};
use meshstep_tensor::{Buffer, Category, DType, Meter};
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for a departing rank's last bytes.
const DEPARTURE: Duration = Duration::from_secs(1);
/// Longest sleep of a rank that waits outside of any operation.
const NAP: Duration = Duration::from_millis(5);

/// A rank's seat in a group over a transport.
#[derive(Debug)]
pub(crate) struct P2pSeat {
    group: Arc<P2pGroup>,
}

/// Returns the communicator of a rank over a transport. The transport's audience shares this rank's host.
pub(crate) fn communicator(
    streams: (Box<dyn Transport>, Hosts),
    clock: Clock,
    timeout: Duration,
    faults: Faults,
) -> Result<GroupRank<P2pSeat>, Error> {
    let seat = P2pSeat { group: P2pGroup::new(streams, clock, timeout, None) };
    GroupRank::new(seat, Arc::<Life<_>>::default(), faults)
}

impl P2pSeat {
    /// # Safety
    /// As for [`RankSeat::run`].
    unsafe fn run_locked(
        &self,
        called: Called,
        memory: OpMemory,
        after: Duration,
        writer: Option<&mut ChunkWriter<'_>>,
    ) -> Result<Formed, Arc<Error>> {
        let group = &*self.group;
        if group.is_split() {
            group.look_above();
        }
        let mut engine = group.engine.lock();
        let deadline = group.clock.now().saturating_add(after);
        let running = Running { group, called, deadline, after };
        if engine.failure.is_known() {
            return Err(engine.settle(Stop::Heard));
        }
        // SAFETY: the caller's promise; after a failure `settle` abandons the memory.
        unsafe { engine.run(running, &memory, writer) }.map_err(|stop| engine.settle(stop))
    }

    /// Passes an abort on to the groups split from this one.
    fn pass_on(&self, error: &Arc<Error>) {
        if let Error::Aborted { .. } = **error {
            self.group.abort_below(error);
        }
    }

    fn form(&self, op_number: u64, formed: Formed) -> Result<Option<Self>, Arc<Error>> {
        let Some((members, channel)) = formed else { return Ok(None) };
        let mut engine = self.group.engine.lock();
        match engine.links.transport.split(&members, channel) {
            Ok(transport) => {
                let (clock, timeout) = (self.group.clock.clone(), self.group.timeout);
                let streams = (transport, engine.links.hosts.split(&members));
                let parent = Parent { group: Arc::clone(&self.group), op_number };
                let group = P2pGroup::new(streams, clock, timeout, Some(parent));
                Ok(Some(P2pSeat { group }))
            }
            Err(lost) => {
                // The others may have formed the group: this failure ends it.
                engine.at = op_number;
                let error = Error::Lost { rank: lost.peer, why: lost.why.to_string() };
                Err(engine.settle(Stop::Found(error)))
            }
        }
    }
}

impl RankSeat for P2pSeat {
    type Memory = OpMemory;
    const LENDS: bool = false;

    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world_size(&self) -> usize {
        self.group.world_size
    }

    fn clock(&self) -> &Clock {
        &self.group.clock
    }

    fn timeout(&self) -> Duration {
        self.group.timeout
    }

    fn memory(buffer: &Buffer, _: Action, besides: Besides<'_>) -> OpMemory {
        OpMemory::of(buffer, besides.source())
    }

    fn observed(memory: OpMemory, observer: Observed) -> OpMemory {
        memory.observed_by(observer)
    }

    fn gathers_while_written(&self, buffer: &Buffer) -> bool {
        let mut engine = self.group.engine.lock();
        engine.links.transport.windows().is_some_and(|windows| windows.find(buffer.as_ptr()).is_some())
    }

    unsafe fn begin(&self, called: Called, _: OpMemory) -> Begun {
        // Alone there is nobody to wait for, and without a factor nothing to compute.
        let done = called.action.is_done_alone(self.group.world_size);
        if done { Begun::Posted { carried: true } } else { Begun::Not }
    }

    fn is_ready(&self, _: Duration) -> bool {
        // Only a group of one rank posts.
        self.group.world_size == 1
    }

    unsafe fn run(
        &self,
        called: Called,
        memory: OpMemory,
        after: Duration,
        _posted: bool,
        writer: Option<&mut ChunkWriter<'_>>,
    ) -> Result<Ended<Self>, Arc<Error>> {
        // SAFETY: the caller's promise.
        let formed = unsafe { self.run_locked(called, memory, after, writer) };
        self.group.fail_aside();
        let formed = formed
            .and_then(|formed| self.form(called.op_number, formed))
            .inspect_err(|error| self.pass_on(error))?;
        Ok(Ended { formed, non_finite: 0 })
    }

    fn pause(&self, until: Duration) -> Result<(), Arc<Error>> {
        loop {
            let mut engine = self.group.engine.lock();
            engine.links.poll();
            let stop = self.group.take_raised().err();
            if let Some(stop) = stop.or_else(|| engine.has_failed().then_some(Stop::Heard)) {
                return Err(engine.settle(stop)).inspect_err(|error| self.pass_on(error));
            }
            if self.group.clock.now() >= until {
                return Ok(());
            }
            engine.links.wait(NAP);
        }
    }

    fn miss(&self, called: Called, after: Duration) -> Arc<Error> {
        let mut engine = self.group.engine.lock();
        engine.at = called.op_number;
        let rank = engine.links.rank;
        let begun = engine.collectives;
        engine.stand(&called, begun);
        engine.stands[rank] = Stand::Idle;
        let error = verdict::timeout(&engine.stands, rank, called, after);
        engine.settle(Stop::Found(error))
    }

    unsafe fn flip_a_bit(memory: OpMemory, of_input: bool) {
        let memory = if of_input { memory.input() } else { memory };
        let middle = memory.bytes() / 2;
        if memory.bytes() > 0 {
            // SAFETY: the caller's promise.
            let byte = unsafe { memory.slice_mut(middle..middle + 1) };
            byte[0] ^= 1 << 6;
        }
    }

    fn zeroed(
        &self,
        len: usize,
        dtype: DType,
        counted: (&Meter, Category),
        apart: &[usize],
    ) -> Option<Result<Buffer, meshstep_tensor::Error>> {
        windows::zeroed(&self.group, len, dtype, counted, apart)
    }

    fn register(&self, comm: &dyn Communicator, buffer: &Buffer) -> Result<bool, Error> {
        windows::register(&self.group, comm, buffer)
    }

    fn fail(&self, error: Error) {
        self.group.raise(error);
    }

    fn abort(&self) {
        self.group.abort(&Error::Aborted { rank: self.group.rank });
    }

    fn sound(&self) -> Result<(), Error> {
        self.group.look_above();
        let Some(mut engine) = self.group.engine.try_lock() else { return Ok(()) };
        engine.links.poll();
        if engine.has_failed() { Err(Error::clone(&engine.settle(Stop::Heard))) } else { Ok(()) }
    }

    fn depart(&self, op_number: u64) {
        self.group.depart(op_number);
    }

    fn drop_wait(&self) -> Duration {
        self.group.drop_wait
    }

    fn await_departure(&self) {
        self.group.await_departure(DEPARTURE);
    }
}
