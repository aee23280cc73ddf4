//! What goes wrong between workers, their arbiter and its log.

use crate::Refusal;
use meshstep_comm::rendezvous;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// What a worker meets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The arbiter does not give what was asked for.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The arbiter could not be reached, or did not answer. What was asked for may be asked for again: a vote's end is what it is.
    #[error("no answer to {what} for {after:?}; see whether the arbiter runs, and ask again")]
    Unanswered {
        /// What was asked for.
        what: &'static str,
        /// The worker's deadline.
        after: Duration,
    },
    /// A boundary before the end of the exchange at the last one is known.
    #[error("round {round} has no end yet; vote on it, with Failed to give it up, before the next boundary")]
    Undecided {
        /// The exchange.
        round: u64,
    },
    /// A vote on another exchange than this worker's last.
    #[error("a vote on round {asked}, but this worker's last is {round}")]
    OtherRound {
        /// The one voted on.
        asked: u64,
        /// The one it is in; 0 for none.
        round: u64,
    },
    /// The worker has called something else, or has the answer already.
    #[error("another call of this worker took this one's place; make one at a time")]
    Overtaken,
    /// The worker has left, or its handle was given up.
    #[error("this worker has left")]
    Left,
    /// What rank 0 of this worker met, in the words that it told the others.
    #[error("rank 0 of this worker: {message}")]
    Rank0 {
        /// Those words.
        message: String,
    },
    /// The arbiter's settings.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The arbiter's log.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The connection to the arbiter, or its listening.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The arbiter met a worker that has heard a later one.
    #[error(
        "this arbiter is of term {term} and epoch {epoch}, but a worker knows of term {later_term} and epoch {later_epoch}; end it, \
         another has its place, or begin a new run under a name of its own"
    )]
    Superseded {
        /// The arbiter's.
        term: u64,
        /// The arbiter's.
        epoch: u64,
        /// The worker's.
        later_term: u64,
        /// The worker's.
        later_epoch: u64,
    },
    /// A communicator of an epoch that is over, or once more.
    #[error(
        "no communicator for rank {rank} of epoch {epoch}; each member takes one when an epoch begins, and keeps it"
    )]
    NoSeat {
        /// The epoch asked for.
        epoch: u64,
        /// The worker's rank in it.
        rank: usize,
    },
    /// The communicator of an epoch.
    #[error(transparent)]
    Communicator(#[from] meshstep_comm::Error),
    /// The system gave no thread.
    #[error("no thread for the membership: {message}")]
    NoThread {
        /// What the system said.
        message: String,
    },
}

/// What is wrong between a worker and the arbiter's address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The arbiter's address is not its host's loopback, and there is no token.
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
    /// The arbiter is another run's.
    #[error("this worker is of run {run:?}, but {addr} serves {serves:?}; call the arbiter of its own run")]
    OtherRun {
        /// The arbiter's address.
        addr: SocketAddr,
        /// The worker's run.
        run: String,
        /// What is served there.
        serves: String,
    },
    /// Something else listens there.
    #[error("what listens on {addr} is no arbiter of this version ({why}); see Caller::addr")]
    NotAnArbiter {
        /// The address.
        addr: SocketAddr,
        /// How it showed.
        why: rendezvous::Why,
    },
    /// Somebody else listens on the arbiter's port.
    #[error("port {} of {} is taken; give Service::start a free one, or port 0 for any", addr.port(), addr.ip())]
    PortTaken {
        /// The arbiter's address.
        addr: SocketAddr,
    },
    /// The arbiter is to listen where it does not run.
    #[error("{addr} is no address of this machine; give Service::start one of those that it has")]
    NotLocal {
        /// The address.
        addr: SocketAddr,
    },
    /// What the system refused.
    #[error(transparent)]
    Other(rendezvous::Error),
}

impl From<rendezvous::Error> for ConnectionError {
    fn from(error: rendezvous::Error) -> Self {
        match error {
            rendezvous::Error::TokenNeeded { addr } => ConnectionError::TokenNeeded { addr },
            rendezvous::Error::WrongToken { addr } => ConnectionError::WrongToken { addr },
            rendezvous::Error::OtherRun { addr, run_id: run, store: serves } => {
                ConnectionError::OtherRun { addr, run, serves }
            }
            rendezvous::Error::NotAStore { addr, why } => ConnectionError::NotAnArbiter { addr, why },
            rendezvous::Error::PortTaken { addr } => ConnectionError::PortTaken { addr },
            rendezvous::Error::NotLocal { addr } => ConnectionError::NotLocal { addr },
            other => ConnectionError::Other(other),
        }
    }
}

/// What an arbiter's settings cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No run could begin, or none could go on.
    #[error(
        "{workers} workers of which {min_workers} suffice; there must be 1 <= min_workers <= workers <= {max}"
    )]
    Workers {
        /// `workers`.
        workers: usize,
        /// `min_workers`.
        min_workers: usize,
        /// As many as a run takes.
        max: usize,
    },
    /// Nobody can be heard in no time, and nobody waits for ever.
    #[error("a silence of {silence:?} and a patience of {patience:?}; each is from a millisecond to {max:?}")]
    Time {
        /// `silence`.
        silence: Duration,
        /// `patience`.
        patience: Duration,
        /// As long as each may be.
        max: Duration,
    },
    /// Nobody waits for ever for a worker to call again.
    #[error("a grace of {grace:?}; it is at most {max:?}")]
    Grace {
        /// `grace`.
        grace: Duration,
        /// As long as it may be.
        max: Duration,
    },
    /// The log is of a run with another plan or rule.
    #[error("the log is of a run with another plan or rule; give this run a log of its own")]
    OtherRun,
}

/// What is wrong with a log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// The system refused.
    #[error("cannot {what} {path:?}: {message}")]
    System {
        /// To do what.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// What it said.
        message: String,
    },
    /// Another arbiter has it open.
    #[error("{path:?} is another arbiter's; end that one first")]
    Locked {
        /// The log.
        path: PathBuf,
    },
    /// It is no log of this version.
    #[error("this is no arbiter's log of this version; name a file that does not exist to begin a new run")]
    NotALog,
    /// A record that was whole has changed: what was decided is not known for sure.
    #[error(
        "the record at byte {at} has changed since it was written; begin a new run from the last checkpoint"
    )]
    Changed {
        /// Where it begins.
        at: usize,
    },
}
