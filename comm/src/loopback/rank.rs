//! Communicator handle of a rank, and its drop.

use super::meeting::MeetingSeat;
use super::worker::RankWorker;
use crate::communicator::nothing;
use crate::faults::Faults;
use crate::op::Action;
use crate::sync::{self, Mutex};
use crate::{Communicator, Error, InFlight, Op, Reduction, Stats};
use meshstep_tensor::{Buffer, Queue, SliceMut};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard as StdGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// Rank of a group of threads of this process.
#[derive(Debug)]
pub(super) struct Loopback {
    place: Arc<RankWorker>,
    life: Arc<Life>,
}

/// All groups of a rank: the world and the groups split from it.
#[derive(Debug, Default)]
pub(super) struct Life {
    places: Mutex<Vec<Arc<RankWorker>>>,
    /// Thread with a panic handler (`spawn`), which reports a panic with its message after unwinding. This is not one of `sync`'s
    /// locks: it is taken while unwinding, where a simulated thread must not be interrupted.
    watched: StdMutex<Option<ThreadId>>,
}

/// Reason for a rank's end.
#[derive(Clone, Debug)]
pub(super) enum End {
    Left,
    Panicked(String),
}

impl Loopback {
    /// Takes `seat` and starts its communication thread.
    pub(super) fn new(seat: MeetingSeat, life: Arc<Life>, faults: Faults) -> Result<Self, Error> {
        let rank = seat.rank;
        let place = RankWorker::new(seat, faults);
        let worker = Arc::clone(&place);
        let name = format!("meshstep-comm-{rank}");
        if let Err(error) = sync::spawn(name, move || worker.run()) {
            let error = Error::NoThread { rank, message: error.to_string() };
            place.seat.group.fail(error.clone());
            return Err(error);
        }
        life.places.lock().push(Arc::clone(&place));
        Ok(Loopback { place, life })
    }

    pub(super) fn life(&self) -> Arc<Life> {
        Arc::clone(&self.life)
    }
}

impl RankWorker {
    fn end(&self, how: End) {
        if let End::Panicked(message) = how {
            self.seat.group.fail(Error::Panicked { rank: self.seat.rank, message });
        }
        self.lane.close();
    }
}

impl Life {
    /// Leaves the report of a panic of this thread to the caller, which gets its message after unwinding.
    pub(super) fn watch(&self) {
        *self.watched() = Some(thread::current().id());
    }

    /// Ends the rank's membership in all its groups.
    pub(super) fn end(&self, how: &End) {
        *self.watched() = None;
        let places = std::mem::take(&mut *self.places.lock());
        places.iter().for_each(|place| place.end(how.clone()));
    }

    fn forget(&self, place: &Arc<RankWorker>) {
        self.places.lock().retain(|other| !Arc::ptr_eq(other, place));
    }

    fn watched(&self) -> StdGuard<'_, Option<ThreadId>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.place.end(End::Left);
        } else if *self.life.watched() == Some(thread::current().id()) {
            return;
        } else {
            self.place.end(End::Panicked("its communicator was dropped while its thread unwound".to_owned()));
        }
        self.life.forget(&self.place);
    }
}

impl Communicator for Loopback {
    fn rank(&self) -> usize {
        self.place.seat.rank
    }

    fn world_size(&self) -> usize {
        self.place.seat.group.world_size()
    }

    fn start(&self, op: Op, buffer: Buffer, _after: &Queue) -> Result<InFlight, (Buffer, Error)> {
        let ticket = self.place.lane.enqueue(op, (buffer, None), false)?;
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
        self.place.keep(within.map_or(op, |within| op.within(within)), values, kept)
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let op = Op::of(Action::Split { color, key });
        let (_, result, ended) = self.place.complete(op, nothing()?);
        result?;
        let Some(seat) = ended.formed else { return Ok(None) };
        Ok(Some(Arc::new(Loopback::new(seat, self.life(), Faults::none())?)))
    }

    fn abort(&self) {
        self.place.seat.group.abort(&Error::Aborted { rank: self.place.seat.rank });
    }

    fn stats(&self) -> Stats {
        self.place.lane.stats()
    }
}
