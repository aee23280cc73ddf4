//! The backends that every table of collectives and failures runs on.

#[cfg(unix)]
use meshstep_comm::tcp::{self, Encrypt, Options};
use meshstep_comm::{Communicator, Error, loopback, p2p};
use std::sync::Arc;

/// A backend, as a row of every table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Backend {
    Loopback,
    /// Messages between threads, through streams of `room` bytes, with `host_size` ranks on each pretended host.
    Messages {
        room: usize,
        host_size: usize,
    },
    /// Threads that meet as processes do.
    #[cfg(unix)]
    Tcp(Way),
}

/// The way of bytes between ranks that are processes.
#[cfg(unix)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Way {
    Sockets,
    /// Encrypted sockets.
    Sealed,
    SharedMemory,
    /// Two hosts, each with half of the ranks in a row: shared memory within a host, encrypted sockets between them.
    Halves,
    /// Two hosts with ranks in turns, between them sockets without encryption.
    InTurns,
}

#[cfg(unix)]
pub(crate) const WAYS: [Way; 5] = [Way::Sockets, Way::Sealed, Way::SharedMemory, Way::Halves, Way::InTurns];

/// All backends. Streams of an odd size cut elements and frames at any byte.
pub(crate) const BACKENDS: &[Backend] = &[
    Backend::Loopback,
    Backend::Messages { room: 64 << 10, host_size: usize::MAX },
    Backend::Messages { room: 64 << 10, host_size: 1 },
    Backend::Messages { room: 64 << 10, host_size: 2 },
    Backend::Messages { room: 16_381, host_size: 3 },
    #[cfg(unix)]
    Backend::Tcp(Way::Sockets),
    #[cfg(unix)]
    Backend::Tcp(Way::Sealed),
    #[cfg(unix)]
    Backend::Tcp(Way::SharedMemory),
    #[cfg(unix)]
    Backend::Tcp(Way::Halves),
    #[cfg(unix)]
    Backend::Tcp(Way::InTurns),
];

#[cfg(unix)]
impl Way {
    /// Options of a rank.
    pub(crate) fn options(self, rank: usize, ranks: usize) -> Options {
        let (encrypt, shared_memory, host) = match self {
            Way::Sockets => (Encrypt::Never, false, None),
            Way::Sealed => (Encrypt::Always, false, None),
            Way::SharedMemory => (Encrypt::Remote, true, None),
            Way::Halves => (Encrypt::Remote, true, Some(2 * rank / ranks)),
            Way::InTurns => (Encrypt::Never, true, Some(rank % 2)),
        };
        Options { encrypt, shared_memory, host_id: host.map(|host| host as u64), ..Options::default() }
    }

    fn config(self, config: loopback::Config) -> tcp::in_process::InProcessConfig {
        let loopback::Config { ranks, timeout, clock, faults } = config;
        let options = |rank| Options { timeout, ..self.options(rank, ranks) };
        let store = meshstep_cases::process::free_addr();
        tcp::in_process::InProcessConfig { store, ranks: (0..ranks).map(options).collect(), clock, faults }
    }
}

/// Ranks that cannot meet fail the test.
#[cfg(unix)]
fn met<T>(result: Result<T, tcp::Error>) -> Result<T, Error> {
    match result {
        Ok(value) => Ok(value),
        Err(tcp::Error::Communicator(error)) => Err(error),
        Err(error) => panic!("the ranks do not meet: {error}"),
    }
}

impl Backend {
    /// Runs `body` on each rank, like `loopback::spawn_with`.
    pub(crate) fn spawn_with<T: Send>(
        self,
        config: loopback::Config,
        body: impl Fn(Arc<dyn Communicator>) -> T + Sync,
    ) -> Result<Vec<T>, Error> {
        match self {
            Backend::Loopback => loopback::spawn_with(config, body),
            Backend::Messages { room, host_size } => {
                p2p::in_process::spawn_with(messages(config, room, host_size), body)
            }
            #[cfg(unix)]
            Backend::Tcp(way) => met(tcp::in_process::spawn_with(way.config(config), body)),
        }
    }

    /// Communicators of the ranks of a world, for the caller's own threads.
    pub(crate) fn world(self, ranks: usize) -> Vec<Arc<dyn Communicator>> {
        let config = loopback::Config::new(ranks);
        let world = match self {
            Backend::Loopback => loopback::world(config),
            Backend::Messages { room, host_size } => {
                p2p::in_process::world(messages(config, room, host_size))
            }
            #[cfg(unix)]
            Backend::Tcp(way) => met(tcp::in_process::world(way.config(config))),
        };
        world.unwrap()
    }

    /// Returns the part of `count` rounds that is tried: messages take longer than memory.
    pub(crate) fn rounds(self, count: u32) -> u32 {
        if self.is_tcp() { count.div_ceil(5) } else { count }
    }

    /// True for ranks that meet as processes do, which takes longer than most tests.
    pub(crate) fn is_tcp(self) -> bool {
        !matches!(self, Backend::Loopback | Backend::Messages { .. })
    }

    /// Runs `body` on each of `ranks` ranks.
    pub(crate) fn spawn<T: Send>(
        self,
        ranks: usize,
        body: impl Fn(Arc<dyn Communicator>) -> T + Sync,
    ) -> Result<Vec<T>, Error> {
        self.spawn_with(loopback::Config::new(ranks), body)
    }
}

fn messages(config: loopback::Config, room: usize, host_size: usize) -> p2p::in_process::InProcessConfig {
    let loopback::Config { ranks, timeout, clock, faults } = config;
    p2p::in_process::InProcessConfig { ranks, timeout, clock, faults, room, host_size }
}
