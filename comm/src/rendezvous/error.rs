//! What goes wrong where ranks meet.

use super::EnvironmentError;
use std::net::SocketAddr;
use std::time::Duration;

/// What went wrong in a meeting of processes, or between them later.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The environment does not say which rank this is.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The name of rank 0's host leads nowhere.
    #[error("no address of {host:?} ({message}); set MASTER_ADDR to a name or address of rank 0's machine")]
    NoAddress {
        /// The name.
        host: String,
        /// What the system said.
        message: String,
    },
    /// Rank 0 runs where MASTER_ADDR is not.
    #[error(
        "{addr} is no address of this machine, on which rank 0 runs; set MASTER_ADDR to one of rank 0's machine, the \
         same on every rank"
    )]
    NotLocal {
        /// The address.
        addr: SocketAddr,
    },
    /// Somebody else listens on the store's port.
    #[error(
        "port {} of {} is taken, maybe by an earlier run or another job; `ss -ltnp 'sport = :{}'` says by whom. End it, \
         or set MESHSTEP_PORT to a free port, the same on every rank", addr.port(), addr.ip(), addr.port()
    )]
    PortTaken {
        /// The store's address.
        addr: SocketAddr,
    },
    /// The store's address is not this machine's loopback, and there is no token.
    #[error(
        "{addr} can be reached from other machines, so ranks must prove that they belong to the job; set MESHSTEP_TOKEN, or \
         MESHSTEP_TOKEN_FILE, to the same secret on every rank (`openssl rand -hex 32` makes one)"
    )]
    TokenNeeded {
        /// The store's address.
        addr: SocketAddr,
    },
    /// What the system refused: a socket, a thread, random bytes.
    #[error("no {what}: {message}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// What the system said.
        message: String,
    },
    /// Not every rank came.
    #[error(
        "ranks {missing:?} had not come to {addr} when rank {gave_up} gave up after {after:?}; see whether they run and can \
         reach it{}", Turned(.turned_away)
    )]
    Missing {
        /// Where the store is.
        addr: SocketAddr,
        /// Who had not come.
        missing: Vec<usize>,
        /// Whose deadline it was.
        gave_up: usize,
        /// The deadline.
        after: Duration,
        /// On rank 0 the last few connections that were turned away.
        turned_away: Vec<TurnedAway>,
    },
    /// There is no store.
    #[error(
        "no store at {host}:{port} for {after:?} ({last}); see whether rank 0 runs, and that MASTER_ADDR and MESHSTEP_PORT \
         (or MASTER_PORT) are the same on every rank"
    )]
    Unreachable {
        /// Rank 0's host.
        host: String,
        /// The store's port.
        port: u16,
        /// The deadline.
        after: Duration,
        /// What happened last.
        last: String,
    },
    /// Something else listens on the store's port.
    #[error(
        "what listens on {addr} is no store of this version ({why}); set MESHSTEP_PORT to a free port, the same on every rank"
    )]
    NotAStore {
        /// The store's address.
        addr: SocketAddr,
        /// How it showed.
        why: Why,
    },
    /// The store has another token.
    #[error(
        "the store at {addr} does not have this rank's token; give every rank the same, and see that no other job's store has \
         this port"
    )]
    WrongToken {
        /// The store's address.
        addr: SocketAddr,
    },
    /// The store serves another run.
    #[error(
        "this rank is of run {run_id:?}, but the store at {addr} of {store:?}; set MESHSTEP_PORT to a port of its own for each run"
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
        "this rank is of restart {restart}, but the store of {store}; end this process, it is left over from before"
    )]
    OtherRestart {
        /// This rank's.
        restart: u64,
        /// The store's.
        store: u64,
    },
    /// Ranks disagree how many they are. Every rank gets this error while they gather, later only the newcomer.
    #[error("rank {rank} has world size {world_size}, but rank 0 has {store}; start all ranks with the same")]
    WorldSize {
        /// Who disagrees.
        rank: usize,
        /// What it was told.
        world_size: usize,
        /// What rank 0 was told.
        store: usize,
    },
    /// Two processes have the same rank. Every rank gets this error while they gather, later only the newcomer.
    #[error("two processes are rank {rank}; give each its own RANK, from 0 to the world size less 1")]
    SameRank {
        /// The rank.
        rank: usize,
    },
    /// A process of this rank was here before.
    #[error("rank {rank} was here and went; a store takes nobody back, so start all ranks again")]
    RankGone {
        /// The rank.
        rank: usize,
    },
    /// A rank failed.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// A rank left in order, without what is waited for.
    #[error("rank {rank} left before {awaited}; every rank must make the same calls before it ends")]
    Left {
        /// Who left.
        rank: usize,
        /// What it did not bring.
        awaited: String,
    },
    /// A value did not come.
    #[error(
        "nobody set {key:?} in generation {generation} for {after:?}; see what the rank that sets it is doing"
    )]
    NotSet {
        /// The key.
        key: String,
        /// In which generation.
        generation: u64,
        /// The deadline.
        after: Duration,
    },
    /// Not every rank took part in an all-gather or a barrier.
    #[error(
        "ranks {missing:?} had not come to {name:?} of generation {generation} after {after:?}; see what they are doing"
    )]
    Late {
        /// Its name.
        name: String,
        /// In which generation.
        generation: u64,
        /// Who had not come.
        missing: Vec<usize>,
        /// The deadline.
        after: Duration,
    },
    /// A key or value that is not small.
    #[error(
        "a {what} of {len} bytes, above {max}; the store is for small values, use a collective for large ones"
    )]
    TooLarge {
        /// Key or value.
        what: &'static str,
        /// Its length in bytes.
        len: usize,
        /// The most it may have.
        max: usize,
    },
    /// The store keeps all it was ever given, and that is enough.
    #[error("the store holds {max} bytes, all it takes; set fewer or smaller values")]
    Full {
        /// The most it holds, in bytes.
        max: usize,
    },
    /// This rank's store was dropped.
    #[error("this rank's store was dropped; keep it as long as its generations")]
    Closed,
}

/// A failure of a rank that the others learn of.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A rank said so.
    #[error("rank {rank} failed in generation {generation}: {text}")]
    Published {
        /// Who.
        rank: usize,
        /// In which generation.
        generation: u64,
        /// What it said.
        text: String,
    },
    /// A rank is gone without having left in order: its process ended, or cannot be reached.
    #[error("rank {rank} is lost: {why}")]
    Lost {
        /// Who.
        rank: usize,
        /// How its connection to the store ended.
        why: Why,
    },
}

/// How a connection ended that should not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// The other side closed it, or its process ended.
    #[error("its connection closed")]
    Closed,
    /// Nothing was heard, or nothing was taken.
    #[error("silent for {after:?}")]
    Silent {
        /// That long.
        after: Duration,
    },
    /// It announced a frame above the limit.
    #[error("it sent a frame of {len} bytes, above {max}")]
    TooLong {
        /// The frame's length in bytes.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// A frame was changed, repeated, left out or made by somebody else on the way.
    #[error("it sent a frame with a wrong seal")]
    Forged,
    /// It sent what has no meaning there.
    #[error("it sent what is not understood")]
    NotUnderstood,
    /// It does not know the token.
    #[error("it has another token")]
    WrongToken,
    /// What the system said.
    #[error("{message}")]
    System {
        /// In its words.
        message: String,
    },
}

/// A connection that the store turned away before all had come.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{from}: {why}")]
pub struct TurnedAway {
    /// From where.
    pub from: SocketAddr,
    /// What it had done.
    pub why: Why,
}

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

/// Why the store does not take a rank that knows the token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    OtherRun { store: String },
    OtherRestart { store: u64 },
    OtherWorldSize { store: usize },
    RankTaken,
    RankGone,
}

/// Why the ranks of a store cannot go on, told to all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    SameRank { rank: usize },
    WorldSize { rank: usize, world_size: usize },
    GaveUp { rank: usize, after: Duration },
    Full { max: usize },
}
