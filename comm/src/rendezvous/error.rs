//! Errors of the rendezvous.

use super::EnvironmentError;
use std::net::SocketAddr;
use std::time::Duration;

/// Error while processes meet, or between them later.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The environment does not define this process's rank.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The host name of rank 0 has no usable address.
    #[error(
        "no usable address for {host:?} ({message}); give a name or address of rank 0's machine (MASTER_ADDR, if the environment gives it)"
    )]
    NoAddress {
        /// Host name.
        host: String,
        /// Message of the system.
        message: String,
    },
    /// Rank 0 does not run on the machine of MASTER_ADDR.
    #[error(
        "{addr} is not an address of this machine, on which rank 0 runs; give an address of this machine (MASTER_ADDR, if the environment gives it), \
         the same on every rank"
    )]
    NotLocal {
        /// The address.
        addr: SocketAddr,
    },
    /// Another process listens on the store's port.
    #[error(
        "port {} of {} is taken, maybe by an earlier run or another job; `ss -ltnp 'sport = :{}'` shows the process. End it, \
         or set MESHSTEP_PORT to a free port, the same on every rank", addr.port(), addr.ip(), addr.port()
    )]
    PortTaken {
        /// The store's address.
        addr: SocketAddr,
    },
    /// The store's address is not a loopback address, and there is no token.
    #[error(
        "{addr} can be reached from other machines, so ranks must prove that they belong to the job; set MESHSTEP_TOKEN, or \
         MESHSTEP_TOKEN_FILE, to the same secret on every rank (`openssl rand -hex 32` makes one)"
    )]
    TokenNeeded {
        /// The store's address.
        addr: SocketAddr,
    },
    /// The system refused a request: a socket, a thread, random bytes.
    #[error("{what} failed: {message}")]
    System {
        /// The request.
        what: &'static str,
        /// Message of the system.
        message: String,
    },
    /// Not every rank joined.
    #[error(
        "ranks {missing:?} had not joined at {addr} when rank {gave_up} gave up after {after:?}; check that they run and can \
         reach it{}", Turned(.turned_away)
    )]
    Missing {
        /// Address of the store.
        addr: SocketAddr,
        /// Missing ranks.
        missing: Vec<usize>,
        /// Rank with the expired deadline.
        gave_up: usize,
        /// The deadline.
        after: Duration,
        /// The last few rejected connections, on rank 0.
        turned_away: Vec<TurnedAway>,
    },
    /// There is no store.
    #[error(
        "no store at {host}:{port} for {after:?} ({last}); check that rank 0 runs, and that MASTER_ADDR and MESHSTEP_PORT \
         (or MASTER_PORT) are the same on every rank"
    )]
    Unreachable {
        /// Rank 0's host.
        host: String,
        /// The store's port.
        port: u16,
        /// The deadline.
        after: Duration,
        /// Reason of the last failed attempt.
        last: String,
    },
    /// Another program listens on the store's port.
    #[error(
        "the process at {addr} is not a store of this version ({why}); set MESHSTEP_PORT to a free port, the same on every rank"
    )]
    NotAStore {
        /// The store's address.
        addr: SocketAddr,
        /// Symptom.
        why: Why,
    },
    /// The store has another token.
    #[error(
        "the store at {addr} has another token than this rank; give every rank the same token, and check that no other job's \
         store has this port"
    )]
    WrongToken {
        /// The store's address.
        addr: SocketAddr,
    },
    /// The peer has another version of the protocol.
    #[error(
        "the process at {addr} has version {theirs} of the protocol, this one has {mine}; give every process the same build of this \
         program"
    )]
    OtherVersion {
        /// Address of the peer.
        addr: SocketAddr,
        /// This process's version.
        mine: u8,
        /// The peer's version.
        theirs: u8,
    },
    /// The listener has another name than the called one: the call was relayed to it, or its address is given differently.
    #[error(
        "this process called {endpoint:?}, but the listener at {addr} is {listener:?}; give every process the same address of it \
         (MASTER_ADDR, if the environment gives it), or list the other one in Options::names"
    )]
    OtherEndpoint {
        /// Address of the connection.
        addr: SocketAddr,
        /// Name that this process called.
        endpoint: String,
        /// Name of the listener.
        listener: String,
    },
    /// The store serves another run.
    #[error(
        "this rank is of run {run_id:?}, but the store at {addr} is of run {store:?}; set MESHSTEP_PORT to a separate port for each run"
    )]
    OtherRun {
        /// The store's address.
        addr: SocketAddr,
        /// This rank's run.
        run_id: String,
        /// The store's run.
        store: String,
    },
    /// The store serves a later start of the run: this process is left over.
    #[error(
        "this rank is of restart {restart}, but the store is of {store}; end this process, it is left over from an earlier start"
    )]
    OtherRestart {
        /// Restart count of this rank.
        restart: u64,
        /// Restart count of the store.
        store: u64,
    },
    /// Ranks disagree on the world size. Every rank gets this error while they gather, later only the newcomer.
    #[error(
        "rank {rank} has world size {world_size}, but rank 0 has {store}; start all ranks with the same world size"
    )]
    WorldSize {
        /// The rank.
        rank: usize,
        /// World size of the rank.
        world_size: usize,
        /// World size of rank 0.
        store: usize,
    },
    /// Two processes have the same rank. Every rank gets this error while they gather, later only the newcomer.
    #[error("two processes have rank {rank}; give each a RANK of its own, from 0 to the world size less 1")]
    SameRank {
        /// The rank.
        rank: usize,
    },
    /// A process of this rank was lost before.
    #[error("rank {rank} was lost before and cannot rejoin; start all ranks again")]
    RankGone {
        /// The rank.
        rank: usize,
    },
    /// A rank failed.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// A rank left the store without providing an awaited value.
    #[error("rank {rank} left before {awaited}; every rank must make the same calls before it leaves")]
    Left {
        /// The rank.
        rank: usize,
        /// The awaited event.
        awaited: String,
    },
    /// A value was not set in time.
    #[error("{key:?} of generation {generation} was not set within {after:?}; check the rank that sets it")]
    NotSet {
        /// The key.
        key: String,
        /// Generation of the key.
        generation: u64,
        /// The deadline.
        after: Duration,
    },
    /// Not every rank took part in an all-gather or a barrier.
    #[error(
        "ranks {missing:?} had not called {name:?} of generation {generation} after {after:?}; check these ranks"
    )]
    Late {
        /// Name of the operation.
        name: String,
        /// Generation of the operation.
        generation: u64,
        /// Missing ranks.
        missing: Vec<usize>,
        /// The deadline.
        after: Duration,
    },
    /// A key or value is too large for the store.
    #[error("a {what} of {len} bytes is above the limit of {max}; use a collective for large values")]
    TooLarge {
        /// Key, value, name or purpose.
        what: &'static str,
        /// Its length in bytes.
        len: usize,
        /// Limit in bytes.
        max: usize,
    },
    /// The store is full: it keeps the values and failures of its last generations.
    #[error("the store is full at {max} bytes; set fewer or smaller values, or take the next generation")]
    Full {
        /// Limit in bytes.
        max: usize,
    },
    /// All ranks have gone on to later generations.
    #[error("generation {generation} was dropped, {oldest} is the oldest; take the generations in order")]
    OldGeneration {
        /// The dropped generation.
        generation: u64,
        /// The oldest generation.
        oldest: u64,
    },
    /// This rank's store was dropped.
    #[error("this rank's store was dropped; keep it as long as its generations")]
    Closed,
}

meshstep_tensor::debug_is_display!(Error);

/// Failure of a rank that is reported to the others.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The rank reported it.
    #[error("rank {rank} failed in generation {generation}: {text}")]
    Published {
        /// The rank.
        rank: usize,
        /// Generation of the failure.
        generation: u64,
        /// Text of the failure.
        text: String,
    },
    /// The rank was lost without a goodbye: its process ended, or cannot be reached.
    #[error("rank {rank} is lost: {why}")]
    Lost {
        /// The rank.
        rank: usize,
        /// Reason for the end of its connection.
        why: Why,
    },
}

meshstep_tensor::debug_is_display!(Failure);

/// Reason for the unexpected end of a connection.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// The other side closed it, or its process ended.
    #[error("its connection closed")]
    Closed,
    /// Nothing was received, or the other side did not read.
    #[error("silent for {after:?}")]
    Silent {
        /// Duration of the silence.
        after: Duration,
    },
    /// The peer announced a frame above the limit.
    #[error("it sent a frame of {len} bytes, above the limit of {max}")]
    TooLong {
        /// The frame's length in bytes.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// A frame was changed, repeated, dropped or forged on the way.
    #[error("it sent a forged frame")]
    Forged,
    /// The peer sent an invalid message.
    #[error("it sent an invalid message")]
    NotUnderstood,
    /// The peer does not know the token.
    #[error("it has another token")]
    WrongToken,
    /// The peer has another version of the protocol.
    #[error("it has version {theirs} of the protocol")]
    OtherVersion {
        /// The peer's version.
        theirs: u8,
    },
    /// The caller wants another service.
    #[error("it belongs to another service")]
    OtherPurpose,
    /// The caller wants another listener of the service.
    #[error("it belongs to another listener")]
    OtherEndpoint,
    /// Error of the system.
    #[error("{message}")]
    System {
        /// Message of the system.
        message: String,
    },
}

meshstep_tensor::debug_is_display!(Why);

/// Connection that the store rejected before all ranks had joined.
///
/// ```
/// use meshstep_comm::rendezvous::{TurnedAway, Why};
///
/// /// Returns the strangers that have called, for a log.
/// fn strangers(turned_away: &[TurnedAway]) -> Vec<String> {
///     let known = |caller: &&TurnedAway| !matches!(caller.why, Why::Closed | Why::Silent { .. });
///     turned_away.iter().filter(known).map(|TurnedAway { from, why }| format!("{from}: {why}")).collect()
/// }
/// assert!(strangers(&[TurnedAway { from: ([10, 0, 0, 9], 4711).into(), why: Why::Closed }]).is_empty());
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{from}: {why}")]
pub struct TurnedAway {
    /// Address of the peer.
    pub from: SocketAddr,
    /// Reason for the rejection.
    pub why: Why,
}

meshstep_tensor::debug_is_display!(TurnedAway);

struct Turned<'a>(&'a [TurnedAway]);

impl std::fmt::Display for Turned<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, turned_away) in self.0.iter().enumerate() {
            let before = if i == 0 { "; turned away: " } else { ", " };
            write!(f, "{before}{turned_away}")?;
        }
        Ok(())
    }
}

/// Reason why the store refuses a rank that knows the token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    OtherRun {
        store: String,
    },
    OtherRestart {
        store: u64,
    },
    OtherWorldSize {
        store: usize,
    },
    RankTaken,
    /// A process of this rank was lost.
    RankGone,
    /// A process of this rank has left in order; the store is about to end.
    RankLeft,
    OtherPurpose {
        listener: String,
    },
    OtherEndpoint {
        listener: String,
    },
}

/// Reason why the ranks of a store cannot go on, sent to all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    SameRank { rank: usize },
    WorldSize { rank: usize, world_size: usize },
    GaveUp { rank: usize, after: Duration },
    Full { max: usize },
}
