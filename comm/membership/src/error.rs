//! Errors of workers, their arbiter and its log.

use crate::Refusal;
use crate::tcp::protocol::{VERSION, version_and_run};
use meshstep_comm::rendezvous;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Error of a worker's call or of the arbiter.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The arbiter refused the request.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The arbiter could not be reached, or did not answer. The worker may repeat the request: a decision on a vote stays the same.
    #[error(
        "no answer to {what} for {after:?}; check that the arbiter runs and that the deadline is longer than the time between exchanges, \
         and call again"
    )]
    Unanswered {
        /// The request.
        what: &'static str,
        /// The worker's deadline.
        after: Duration,
    },
    /// No arbiter can be reached, and the worker may go on without this exchange ([`Caller::alone`](crate::Caller::alone)).
    #[error(
        "no arbiter can be reached; step {step} is taken without an exchange, and up to {left} steps after it may be"
    )]
    Alone {
        /// The step.
        step: u64,
        /// Number of steps after it that may be taken without an arbiter.
        left: u64,
    },
    /// No arbiter could be reached, and the worker has taken all steps that it may take alone.
    #[error(
        "no arbiter could be reached for {after:?} before step {step}; the last exchange was at step {last}, and a worker takes at most \
         {alone} steps alone: start the arbiter again on its log, or promote its standby, and then start this worker again"
    )]
    Away {
        /// Step before which the worker has waited.
        step: u64,
        /// Step of the last granted exchange.
        last: u64,
        /// Number of steps that the worker may take alone.
        alone: u64,
        /// The worker's deadline.
        after: Duration,
    },
    /// The worker came to a boundary before it knows the end of its last exchange.
    #[error("round {round} is not decided yet; vote on it (Failed gives it up) before the next boundary")]
    Undecided {
        /// Number of the last round.
        round: u64,
    },
    /// The worker voted on another exchange than its last.
    #[error("vote on round {asked}, but this worker's last round is {round}")]
    OtherRound {
        /// Round that was voted on.
        asked: u64,
        /// The worker's last round; 0 for none.
        round: u64,
    },
    /// The worker made another call meanwhile, or has taken the answer already.
    #[error("another call of this worker replaced this one; make one call at a time")]
    Overtaken,
    /// The worker has left, or its handle was dropped.
    #[error("this worker has left")]
    Left,
    /// Rank 0 of this worker met an error, and sent its text to the other ranks.
    #[error("rank 0 of this worker: {message}")]
    Rank0 {
        /// Text of the error.
        message: String,
    },
    /// The arbiter's settings are invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The arbiter's log cannot be used.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The worker cannot connect, or the arbiter cannot listen.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The arbiter met a worker that already knows a later arbiter.
    #[error(
        "this arbiter is of term {term} and epoch {epoch}, but a worker knows of term {later_term} and epoch {later_epoch}; end it, \
         another has its place, or begin a new run under a name of its own"
    )]
    Superseded {
        /// The arbiter's term.
        term: u64,
        /// The arbiter's epoch.
        epoch: u64,
        /// The worker's term.
        later_term: u64,
        /// The worker's epoch.
        later_epoch: u64,
    },
    /// The arbiter met a worker that knows the end of an exchange that is not in the log: the log is an incomplete copy.
    #[error(
        "this arbiter's log ends in round {round}, but a worker knows of round {later}; start the arbiter that wrote the original log, or \
         begin a new run from the last checkpoint"
    )]
    Stale {
        /// Last round in the log.
        round: u64,
        /// Round that the worker knows of.
        later: u64,
    },
    /// The arbiter's log has less than the standby's copy, which stays as it is.
    #[error(
        "the arbiter's log, in round {round} (term {term}, epoch {epoch}), has less than this copy of it, in round {copy_round} (term \
         {copy_term}, epoch {copy_epoch}); end that arbiter and promote this copy, or name a new file for the copy"
    )]
    OldRecord {
        /// The arbiter's term.
        term: u64,
        /// The arbiter's epoch.
        epoch: u64,
        /// Last round in the arbiter's log.
        round: u64,
        /// Term of the copy.
        copy_term: u64,
        /// Epoch of the copy.
        copy_epoch: u64,
        /// Last round in the copy.
        copy_round: u64,
    },
    /// Another standby follows the arbiter in place of this one.
    #[error("another standby follows this arbiter now, and an arbiter has one; end this one or the other")]
    Replaced,
    /// The epoch of the requested communicator is over, or the worker has taken the communicator already.
    #[error(
        "no communicator for rank {rank} of epoch {epoch}; each member takes one when an epoch begins, and keeps it"
    )]
    NoSeat {
        /// Epoch of the communicator.
        epoch: u64,
        /// The worker's rank in the epoch.
        rank: usize,
    },
    /// The communicator of an epoch could not be made.
    #[error(transparent)]
    Communicator(#[from] meshstep_comm::Error),
    /// The communicator of an epoch between processes could not be made.
    #[cfg(unix)]
    #[error("cannot join the members of epoch {epoch}: {cause}")]
    World {
        /// The epoch.
        epoch: u64,
        /// Error of the communicator.
        cause: meshstep_comm::tcp::Error,
    },
    /// The first member of an epoch did not give a [`Contact`](crate::Contact).
    #[error(
        "worker {id} gave the contact {contact:?}; give every worker a Contact of this library, or connect in another way"
    )]
    NotAContact {
        /// Id of the member.
        id: u64,
        /// Its contact.
        contact: String,
    },
    /// The worker's address has no free port, or is not of this machine.
    #[error("no free port at {ip}: {message}; give the worker an address of this machine")]
    NoPort {
        /// The address.
        ip: std::net::IpAddr,
        /// Message of the system.
        message: String,
    },
    /// The system could not start a thread.
    #[error("cannot start the membership thread: {message}")]
    NoThread {
        /// Message of the system.
        message: String,
    },
}

meshstep_comm::debug_is_display!(Error);

/// Error of a connection between a worker and the arbiter's address.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The arbiter's address can be reached from other machines, and no token was given.
    #[error(
        "{addr} can be reached from other machines, so workers must prove that they belong to the run; give Service::start and every \
         Caller the same token (`openssl rand -hex 32` makes one)"
    )]
    TokenNeeded {
        /// The arbiter's address.
        addr: SocketAddr,
    },
    /// The arbiter has another token.
    #[error(
        "the arbiter at {addr} does not have this worker's token; give every Caller that of Service::start"
    )]
    WrongToken {
        /// The arbiter's address.
        addr: SocketAddr,
    },
    /// The arbiter at this address serves another run.
    #[error("this worker is of run {run:?}, but {addr} serves {serves:?}; call the arbiter of its own run")]
    OtherRun {
        /// The arbiter's address.
        addr: SocketAddr,
        /// The worker's run.
        run: String,
        /// The arbiter's run.
        serves: String,
    },
    /// The arbiter at this address has another name: the call was relayed to it.
    #[error(
        "this worker called {addr}, but the arbiter there is {listener}; check Caller::addr, or give Service::add_name the address of \
         a forwarded port"
    )]
    OtherEndpoint {
        /// Address that the worker called.
        addr: SocketAddr,
        /// Name of the arbiter.
        listener: String,
    },
    /// The arbiter has another version of the protocol.
    #[error(
        "the arbiter at {addr} has version {theirs} of the protocol, this worker has {mine}; give both the same build"
    )]
    OtherVersion {
        /// The arbiter's address.
        addr: SocketAddr,
        /// The worker's version.
        mine: u8,
        /// The arbiter's version.
        theirs: u8,
    },
    /// The arbiter at this address has a successor.
    #[error("the arbiter at {addr} is of term {term}, and there is one of term {known}; end the old one")]
    OldTerm {
        /// The arbiter's address.
        addr: SocketAddr,
        /// The arbiter's term.
        term: u64,
        /// Highest known term.
        known: u64,
    },
    /// The caller has no address of an arbiter.
    #[error("no address of an arbiter; give Caller::addrs at least one")]
    NoAddress,
    /// Another program listens at this address.
    #[error("the program listening on {addr} is not an arbiter of this version ({why}); check Caller::addr")]
    NotAnArbiter {
        /// The address.
        addr: SocketAddr,
        /// Reason that the peer is not an arbiter.
        why: rendezvous::Why,
    },
    /// The arbiter's port is in use.
    #[error("port {} of {} is taken; give Service::start a free one, or port 0 for any", addr.port(), addr.ip())]
    PortTaken {
        /// The arbiter's address.
        addr: SocketAddr,
    },
    /// The arbiter's address is not an address of this machine.
    #[error("{addr} is not an address of this machine; give Service::start one of its addresses")]
    NotLocal {
        /// The address.
        addr: SocketAddr,
    },
    /// Any other refusal of the system.
    #[error(transparent)]
    Other(rendezvous::Error),
}

meshstep_comm::debug_is_display!(ConnectionError);

impl From<rendezvous::Error> for ConnectionError {
    fn from(error: rendezvous::Error) -> Self {
        match error {
            rendezvous::Error::TokenNeeded { addr } => ConnectionError::TokenNeeded { addr },
            rendezvous::Error::WrongToken { addr } => ConnectionError::WrongToken { addr },
            rendezvous::Error::OtherRun { addr, run_id, store } => other_run(addr, &run_id, &store),
            rendezvous::Error::OtherEndpoint { addr, listener, .. } => {
                ConnectionError::OtherEndpoint { addr, listener }
            }
            rendezvous::Error::OtherVersion { addr, mine, theirs } => {
                ConnectionError::OtherVersion { addr, mine, theirs }
            }
            rendezvous::Error::NotAStore { addr, why } => ConnectionError::NotAnArbiter { addr, why },
            rendezvous::Error::PortTaken { addr } => ConnectionError::PortTaken { addr },
            rendezvous::Error::NotLocal { addr } => ConnectionError::NotLocal { addr },
            other => ConnectionError::Other(other),
        }
    }
}

/// Distinguishes another run from another version of the messages, by the purposes of both sides.
fn other_run(addr: SocketAddr, mine: &str, serves: &str) -> ConnectionError {
    let name = |purpose| version_and_run(purpose).map_or(purpose, |(_, run)| run).to_owned();
    match version_and_run(serves) {
        Some((theirs, _)) if theirs != VERSION => {
            ConnectionError::OtherVersion { addr, mine: VERSION, theirs }
        }
        _ => ConnectionError::OtherRun { addr, run: name(mine), serves: name(serves) },
    }
}

/// Invalid settings of an arbiter.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The numbers of workers would keep a run from beginning or continuing.
    #[error(
        "workers = {workers} and min_workers = {min_workers}, but 1 <= min_workers <= workers <= {max} must hold"
    )]
    Workers {
        /// `workers`.
        workers: usize,
        /// `min_workers`.
        min_workers: usize,
        /// Most workers that a run takes.
        max: usize,
    },
    /// A silence or patience is zero or too long.
    #[error(
        "silence = {silence:?} and patience = {patience:?}, but each must be from a millisecond to {max:?}"
    )]
    Time {
        /// `silence`.
        silence: Duration,
        /// `patience`.
        patience: Duration,
        /// Longest value of each.
        max: Duration,
    },
    /// A grace period is too long.
    #[error("grace = {grace:?}, but at most {max:?} is allowed")]
    Grace {
        /// `grace`.
        grace: Duration,
        /// Longest value.
        max: Duration,
    },
    /// The log is of a run with another plan or rule.
    #[error("the log is of a run with another plan or rule; give this run a log of its own")]
    OtherRun,
}

meshstep_comm::debug_is_display!(ConfigError);

/// Error of an arbiter's log.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// A system call failed.
    #[error("cannot {what} {path:?}: {message}")]
    System {
        /// Failed operation.
        what: &'static str,
        /// File or folder.
        path: PathBuf,
        /// Message of the system.
        message: String,
    },
    /// Another arbiter has the log open.
    #[error("{path:?} is in use by another arbiter; stop that one first")]
    Locked {
        /// The log.
        path: PathBuf,
    },
    /// The file is not a log of this version.
    #[error("the file is not an arbiter's log of this version; name a new file to begin a new run")]
    NotALog,
    /// The log has no state yet.
    #[error("{path:?} is the log of no run yet; follow the active arbiter before this log is promoted")]
    Empty {
        /// The log.
        path: PathBuf,
    },
    /// A complete record has changed: the last decision is not known for sure.
    #[error(
        "the record at byte {at} has changed since it was written; begin a new run from the last checkpoint"
    )]
    Changed {
        /// Offset of the record in bytes.
        at: usize,
    },
}

meshstep_comm::debug_is_display!(LogError);
