//! A worker's connection to the other workers, with a count of the bytes sent over all connections.

use std::sync::Arc;

use meshstep_comm::{Clock, Communicator, Faults, loopback};
use meshstep_local::Workers;
use meshstep_membership::{Error, Round};

use super::company::Company;
use super::worker::PATIENCE;

/// Communicators between workers; with changing workers, those of the current epoch.
#[derive(Debug, Default)]
pub(super) struct Link {
    workers: Option<Workers>,
    /// Bytes sent over earlier communicators, minus the bytes of the setup.
    past: i128,
}

impl Link {
    /// Creates the link of workers that all stay.
    pub(super) fn of(workers: Workers) -> Self {
        Link { workers: Some(workers), past: 0 }
    }

    /// Connects to the other workers, the members of `round`.
    pub(super) fn connect(&mut self, company: &Company<'_>, round: &Round) -> Result<Workers, Error> {
        let world = company.connect(round)?;
        let workers = Workers { across: Arc::clone(&world), world };
        self.past = self.total();
        self.workers = Some(workers.clone());
        Ok(workers)
    }

    /// Excludes the bytes sent so far, which belong to the setup, from the count.
    pub(super) fn begin(&mut self) {
        self.past -= self.total();
    }

    /// Returns the bytes sent since the beginning.
    pub(super) fn sent(&self) -> u64 {
        self.total().try_into().unwrap_or(0)
    }

    /// Waits until everything that was sent has arrived and is counted.
    pub(super) fn settle(&self) -> Result<(), meshstep_comm::Error> {
        self.workers.iter().try_for_each(|workers| workers.across.barrier())
    }

    /// Returns this worker's rank among the workers of the epoch.
    pub(super) fn rank(&self) -> Option<usize> {
        self.workers.as_ref().map(|workers| workers.world.rank())
    }

    /// Returns the number of connected workers.
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

/// Returns settings for ranks as threads with a long timeout, because one rank may be many steps ahead.
pub(super) fn settings(ranks: usize) -> loopback::Config {
    loopback::Config { ranks, timeout: PATIENCE, clock: Clock::real(), faults: Faults::none() }
}
