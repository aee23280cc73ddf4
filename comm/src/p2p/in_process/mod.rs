//! Ranks as threads that exchange messages through bounded memory: the collectives over messages without a network, for tests.
//!
//! [`loopback`](crate::loopback) is faster and has the same results.

mod pipes;
pub(super) mod streams;

use super::hosts::Hosts;
use super::{P2pSeat, communicator};
use crate::group::rank::GroupRank;
use crate::group::threads;
use crate::{Clock, Communicator, Error, Faults};
use std::sync::Arc;
use std::time::Duration;

/// Number of ranks, and settings of their operations and streams.
#[derive(Clone, Debug)]
pub struct InProcessConfig {
    /// Ranks in the world; at least one.
    pub ranks: usize,
    /// Default time that an operation waits for the other ranks.
    pub timeout: Duration,
    /// Clock of deadlines and delays.
    pub clock: Clock,
    /// Faults to inject, for tests.
    pub faults: Faults,
    /// Bytes that a stream holds; at least one.
    pub room: usize,
    /// Number of ranks on each pretended host. A rank has one common stream for the others of its host, beside a stream for each rank;
    /// what it writes to all crosses to another host once.
    pub host_size: usize,
}

impl InProcessConfig {
    /// Returns the settings for `ranks` ranks: a timeout of ten minutes, the machine's clock, no faults, streams of 64 KiB, one
    /// host.
    pub fn new(ranks: usize) -> Self {
        let timeout = Duration::from_secs(600);
        InProcessConfig {
            ranks,
            timeout,
            clock: Clock::real(),
            faults: Faults::none(),
            room: 64 << 10,
            host_size: ranks.max(1),
        }
    }
}

/// Runs `body` on each rank, like [`loopback::spawn_with`](crate::loopback::spawn_with).
pub fn spawn_with<T: Send>(
    config: InProcessConfig,
    body: impl Fn(Arc<dyn Communicator>) -> T + Sync,
) -> Result<Vec<T>, Error> {
    threads::spawn(handles(config)?, body)
}

/// Returns the communicators of all ranks, for the caller's own threads, like [`loopback::world`](crate::loopback::world).
pub fn world(config: InProcessConfig) -> Result<Vec<Arc<dyn Communicator>>, Error> {
    Ok(handles(config)?.into_iter().map(|handle| Arc::new(handle) as _).collect())
}

fn handles(config: InProcessConfig) -> Result<Vec<GroupRank<P2pSeat>>, Error> {
    let InProcessConfig { ranks, timeout, clock, faults, room, host_size } = config;
    if ranks == 0 {
        return Err(Error::ZeroRanks);
    }
    let hosts = Hosts::blocks(ranks, host_size);
    let handle = |transport| communicator((transport, hosts.clone()), clock.clone(), timeout, faults.clone());
    streams::world(ranks, room.max(1), hosts.clone()).into_iter().map(handle).collect()
}
