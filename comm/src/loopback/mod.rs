//! Backend with threads of one process as ranks, which exchange buffers through shared memory.
//!
//! Every operation is a rendezvous of its ranks: each posts its call when it starts the operation, and the calls are compared. Then
//! the threads that wait draw portions of the elements and move them until none is left; in a small operation the last rank to arrive
//! moves all of them. Buffers come back only when all bytes have moved. Each rank's communication thread takes part while nobody of
//! the rank waits.

mod cut;
mod meeting;
mod moves;
mod non_temporal;
mod seat;
mod shared;
mod transfers;

use crate::group::rank::{GroupRank, Life};
use crate::group::threads;
use crate::{Clock, Communicator, Error, Faults};
use meeting::MeetingGroup;
use seat::LoopbackSeat;
use std::sync::Arc;
use std::time::Duration;

/// Number of ranks, and settings of their operations.
#[derive(Clone, Debug)]
pub struct Config {
    /// Ranks in the world; at least one.
    pub ranks: usize,
    /// Default time that an operation waits for the other ranks.
    pub timeout: Duration,
    /// Clock of deadlines and delays.
    pub clock: Clock,
    /// Faults to inject, for tests.
    pub faults: Faults,
}

impl Config {
    /// Returns the settings for `ranks` ranks: a timeout of ten minutes, the machine's clock, no faults.
    pub fn new(ranks: usize) -> Self {
        let timeout = Duration::from_secs(600);
        Config { ranks, timeout, clock: Clock::real(), faults: Faults::none() }
    }
}

/// Runs `body` on `ranks` ranks, each on its own thread, and returns the results by rank.
///
/// When `body` returns, its rank leaves all its groups. When it panics, the others' operations fail with [`Error::Panicked`];
/// once all ranks have ended, this call returns the error of the rank that panicked first.
pub fn spawn<T: Send>(
    ranks: usize,
    body: impl Fn(Arc<dyn Communicator>) -> T + Sync,
) -> Result<Vec<T>, Error> {
    spawn_with(Config::new(ranks), body)
}

/// Like [`spawn`], with other settings.
pub fn spawn_with<T: Send>(
    config: Config,
    body: impl Fn(Arc<dyn Communicator>) -> T + Sync,
) -> Result<Vec<T>, Error> {
    threads::spawn(handles(config)?, body)
}

/// Returns the communicators of all ranks, for the caller's own threads. Each rank leaves when its last handle is dropped; a drop
/// while its thread panics counts as a panic.
pub fn world(config: Config) -> Result<Vec<Arc<dyn Communicator>>, Error> {
    Ok(handles(config)?.into_iter().map(|handle| Arc::new(handle) as _).collect())
}

fn handles(config: Config) -> Result<Vec<GroupRank<LoopbackSeat>>, Error> {
    let Config { ranks, timeout, clock, faults } = config;
    if ranks == 0 {
        return Err(Error::ZeroRanks);
    }
    let group = MeetingGroup::new(ranks, clock, timeout);
    let handle = |rank| {
        let seat = LoopbackSeat::new(Arc::clone(&group), rank);
        GroupRank::new(seat, Arc::<Life<_>>::default(), faults.clone())
    };
    (0..ranks).map(handle).collect()
}
