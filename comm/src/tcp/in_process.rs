//! Ranks as threads of this process that meet as processes do, over sockets of this machine or through shared memory, for tests.
//!
//! [`loopback`](crate::loopback) is faster and has the same results.

use super::error::Error;
use super::meeting::{WorldStreams, meet};
use super::options::Options;
use crate::group::rank::GroupRank;
use crate::group::threads;
use crate::p2p::{P2pSeat, communicator};
use crate::rendezvous::Environment;
use crate::{Clock, Communicator, Faults};
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::{self, Builder};

/// Ranks, and settings of their operations.
///
/// ```
/// use meshstep_comm::rendezvous::Generation;
/// use meshstep_comm::tcp::in_process::{InProcessConfig, spawn_with};
/// use meshstep_comm::tcp::{Address, Encrypt, Options, World};
/// use meshstep_comm::{Communicator, Error};
///
/// # let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
/// // Two ranks that take each other for ranks of different machines: their bytes go through encrypted sockets.
/// let host = |host_id| Options {
///     host_id: Some(host_id),
///     encrypt: Encrypt::Always,
///     address: Some(Address::parse("127.0.0.1")),
///     ..Options::default()
/// };
/// let ranks = spawn_with(InProcessConfig::new(free, vec![host(0), host(1)]), |comm| comm.barrier())?;
/// ranks.into_iter().collect::<Result<(), Error>>()?;
///
/// /// Returns the number of the generation that a process is in: each change of the members begins one.
/// fn generation(world: &World) -> u64 {
///     let generation: &Generation = world.generation();
///     generation.number()
/// }
/// # let _ = generation;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct InProcessConfig {
    /// Free loopback address at which the ranks meet.
    pub store: SocketAddr,
    /// Options of each rank; at least one.
    pub ranks: Vec<Options>,
    /// Clock of deadlines and delays of operations.
    pub clock: Clock,
    /// Faults to inject, for tests.
    pub faults: Faults,
}

impl InProcessConfig {
    /// Returns the settings of ranks with these options: the machine's clock, no faults.
    pub fn new(store: SocketAddr, ranks: Vec<Options>) -> Self {
        InProcessConfig { store, ranks, clock: Clock::real(), faults: Faults::none() }
    }
}

/// Runs `body` on each rank, like [`loopback::spawn_with`](crate::loopback::spawn_with).
///
/// # Errors
/// As for [`join`](super::join), and [`Error::Communicator`] with the errors of `loopback::spawn_with`.
pub fn spawn_with<T: Send>(
    config: InProcessConfig,
    body: impl Fn(Arc<dyn Communicator>) -> T + Sync,
) -> Result<Vec<T>, Error> {
    Ok(threads::spawn(handles(config)?, body)?)
}

/// Returns the communicators of all ranks, for the caller's own threads, like [`loopback::world`](crate::loopback::world).
///
/// # Errors
/// As for [`spawn_with`].
pub fn world(config: InProcessConfig) -> Result<Vec<Arc<dyn Communicator>>, Error> {
    Ok(handles(config)?.into_iter().map(|handle| Arc::new(handle) as _).collect())
}

fn handles(config: InProcessConfig) -> Result<Vec<GroupRank<P2pSeat>>, Error> {
    let InProcessConfig { store, ranks, clock, faults } = config;
    if ranks.is_empty() {
        return Err(crate::Error::ZeroRanks.into());
    }
    let join = |rank: usize| -> Result<GroupRank<P2pSeat>, Error> {
        let environment = environment(store, rank, ranks.len());
        let WorldStreams { transport, hosts, meeting, .. } = meet(&environment, &ranks[rank])?;
        Ok(communicator((transport, hosts), clock.clone(), meeting.options.timeout, faults.clone())?)
    };
    thread::scope(|scope| {
        let start = |rank| Builder::new().spawn_scoped(scope, move || join(rank));
        let threads: Result<Vec<_>, _> = (0..ranks.len()).map(start).collect();
        let threads = threads.map_err(Error::system("starting a thread for a rank"))?;
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

fn environment(store: SocketAddr, rank: usize, world_size: usize) -> Environment {
    Environment {
        rank,
        world_size,
        local_rank: rank,
        host: store.ip().to_string(),
        port: store.port(),
        run_id: "in process".to_owned(),
        restart: 0,
        token: None,
    }
}
