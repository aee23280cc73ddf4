//! A worker's connection to the others, and the bytes that it has sent over all that it has had.

use std::sync::Arc;

use meshstep_comm::{Clock, Communicator, Faults, loopback};
use meshstep_membership::{Error, InProcessWorker, Round};
use meshstep_shard::local::Workers;

use super::worker::PATIENCE;

/// Communicators between workers; those of an epoch at a time, where workers come and go.
#[derive(Debug, Default)]
pub(super) struct Link {
    workers: Option<Workers>,
    /// Sent over those before, less what setting up took.
    past: i128,
}

impl Link {
    /// Of workers that stay.
    pub(super) fn of(workers: Workers) -> Self {
        Link { workers: Some(workers), past: 0 }
    }

    /// Goes on with the members of `round`.
    pub(super) fn connect(&mut self, member: &InProcessWorker, round: &Round) -> Result<Workers, Error> {
        let world = member.communicator(round, PATIENCE)?;
        let workers = Workers { across: Arc::clone(&world), world };
        self.past = self.total();
        self.workers = Some(workers.clone());
        Ok(workers)
    }

    /// What was sent so far is what setting up took, and does not count.
    pub(super) fn begin(&mut self) {
        self.past -= self.total();
    }

    /// Bytes sent since it began.
    pub(super) fn sent(&self) -> u64 {
        self.total().try_into().unwrap_or(0)
    }

    /// Waits until everything that was sent has arrived, and counts.
    pub(super) fn settle(&self) -> Result<(), meshstep_comm::Error> {
        self.workers.iter().try_for_each(|workers| workers.across.barrier())
    }

    /// This worker's place among those of the epoch.
    pub(super) fn rank(&self) -> Option<usize> {
        self.workers.as_ref().map(|workers| workers.world.rank())
    }

    /// How many workers are connected.
    pub(super) fn ranks(&self) -> Option<usize> {
        self.workers.as_ref().map(|workers| workers.world.world_size())
    }

    fn total(&self) -> i128 {
        let bytes = |comm: &Arc<dyn Communicator>| i128::from(comm.stats().total().bytes);
        let now =
            self.workers.as_ref().map_or(0, |Workers { world, across }| match Arc::ptr_eq(world, across) {
                true => bytes(world),
                false => bytes(world) + bytes(across),
            });
        self.past + now
    }
}

/// Of a worker that is one rank.
pub(super) fn alone() -> Result<Arc<dyn Communicator>, meshstep_comm::Error> {
    let mut world = loopback::world(settings(1))?;
    world.pop().ok_or(meshstep_comm::Error::ZeroRanks)
}

/// Ranks as threads that wait long for each other: one may be many steps ahead.
pub(super) fn settings(ranks: usize) -> loopback::Config {
    loopback::Config { ranks, timeout: PATIENCE, clock: Clock::real(), faults: Faults::none() }
}
