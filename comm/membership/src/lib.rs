//! Membership of exchanges while workers join and leave.
//!
//! ```
//! use meshstep_comm::Clock;
//! use meshstep_membership::{Ballot, Config, Digest, InProcess, Membership};
//! use std::time::Duration;
//!
//! let digest = Digest { plan: 1, rule: 2 };
//! let run = InProcess::new(Config::new(digest, 1), Clock::real())?;
//! let worker = run.join(7, digest, Duration::from_secs(600))?;
//! for step in [16, 32] {
//!     let round = worker.boundary(step)?; // waits for the other members; names the workers that joined or left
//!     assert_eq!((round.step, round.rank, round.divisor()), (step, 0, 1));
//!     // ... new communicators where `round.epoch` is new; the exchange, into memory of its own ...
//!     if worker.vote(&round, Ballot::Ready)?.is_commit() {
//!         // ... apply it ...
//!     }
//! }
//! worker.leave()?;
//! # Ok::<(), meshstep_membership::Error>(())
//! ```
//!
//! | item | role |
//! |---|---|
//! | [`Membership`] | called by a training loop: a boundary before every exchange, a vote after it |
//! | [`InProcess`] | for workers that are threads of one process |
//! | [`Service`], [`Remote`] | for workers that are processes: the arbiter, with its log, and their calls to it over TCP |
//! | [`Contact`] | communicators of an epoch's members over [`meshstep_comm::tcp`] |
//! | [`Standby`] | a process that keeps a copy of the arbiter's log, to be promoted by hand |
//! | [`Round`] | a granted exchange: the step, the members, the members that count, the communicators' epoch |
//! | [`Decision`] | outcome of an exchange, the same for every member |
//! | [`Arbiter`], [`Member`] | both sides as state machines without clock and sockets, for other transports |
//!
//! # What is promised
//!
//! - Members of a round get the same decision on it, and a commit only if all of them voted ready. The decision is in the arbiter's
//!   log before any member receives it, so the arbiter's successor gives the same one.
//! - A step's exchange is committed once at most. After an abort the members ask for the same step, or a later one, again.
//! - An epoch number belongs to one list of members; communicators are made once for each epoch.
//! - The arbiter waits for a late worker (at a boundary, with its vote, or with its beats) until a deadline and not after it. Every
//!   call returns within the worker's own deadline, whatever happens to the arbiter.
//! - A worker that is no longer a member gets [`Refusal::Fenced`], even if its process was suspended and an old answer reaches it
//!   afterwards.
//!
//! # While the arbiter is away
//!
//! A worker tries the arbiter's addresses in turn ([`Caller::addrs`]) until one answers. When it has had no connection for a second, a
//! boundary returns [`Error::Alone`] at once, and the worker steps on without an exchange, for [`Caller::alone`] steps after the last
//! granted one. A connection is given up after half of [`Config::silence`] without a message, and not before two seconds: so long it
//! takes to notice an arbiter on a machine that has stopped. A boundary that was given up may still be granted: the next one then
//! returns a round of the earlier step, which the worker ends with [`Ballot::Failed`]. At the bound it waits for its deadline, and ends with [`Error::Away`]. A vote waits for its deadline, because its exchange may be
//! committed. When an arbiter is back, workers that are behind go on to the step of the others ([`Refusal::Behind`]), and all exchange
//! there.
//!
//! The arbiter is started again on its log ([`Service::start`]), or a [`Standby`] is promoted: end it, call [`Log::promote`] on its log,
//! and start a [`Service`] on that. While a standby follows, the arbiter sends nothing that is not on the standby's disk; one that does
//! not answer for a second is given up, and may follow again. A promotion raises the term above every start of the old arbiter, which is
//! refused if it returns, and stops when a worker or a standby tells it ([`Error::Superseded`]). An arbiter on an incomplete copy stops
//! with [`Error::Stale`] when a worker knows more.
//!
//! # How
//!
//! The arbiter has one record, [`State`]. It logs the whole state at every change and sends messages after that. Workers repeat a
//! request until it is answered; a repeated request has no further effect. Every message of a worker carries the highest term
//! (start of the arbiter) and epoch that the worker knows of, and the last round with a known end; every message of an arbiter carries its term; messages from an older
//! term are ignored.
//!
//! # Limits
//!
//! - Between processes the limits of the rendezvous connections hold: authenticated by the job's token and encrypted.
//! - One arbiter, and one standby that a person promotes. Two arbiters that both have workers, because a network is cut in two, both go
//!   on until a worker meets both: promote a standby only after the arbiter has ended.
//! - A worker whose exchange was committed, and that did not hear of it within its deadline, joins again. If no worker heard of it, the
//!   run's state is lost with them: let the deadline be longer than the arbiter's restart.
//! - The copy of a standby that was given up is incomplete. An arbiter on such a copy stops at the first message of a worker that knows
//!   more; another worker that sends first may abort a round that the other knows as committed.
//! - At most 256 workers.
//! - The arbiter believes workers that give a wrong id, or vote ready without being ready.

mod arbiter;
mod config;
mod durable_arbiter;
mod error;
mod in_process;
mod log;
mod log_records;
mod member;
mod message;
mod refusal;
pub mod relay;
mod round;
mod state;
mod tcp;
mod wire;

pub use arbiter::{Arbiter, Output};
pub use config::Config;
pub use error::{ConfigError, ConnectionError, Error, LogError};
pub use in_process::{InProcess, InProcessWorker};
pub use log::Log;
pub use member::{Answer, Member, Request};
pub use message::{Ask, Digest, FromArbiter, ToArbiter, Word, Worker};
pub use refusal::Refusal;
pub use round::{Ballot, Decision, Departure, Gone, Round, Seat};
pub use state::{Former, Place, State};
#[cfg(unix)]
pub use tcp::Contact;
pub use tcp::{Caller, Remote, Service, Standby, StandbyCopy};

use std::fmt::Debug;
use std::time::Duration;

/// Membership of one worker in a run that workers join and leave.
///
/// Nothing is called between two exchanges. At each exchange the loop calls [`boundary`](Membership::boundary), exchanges with the
/// members of the returned round, calls [`vote`](Membership::vote), and applies everything or nothing according to the decision.
/// Only one call is made at a time.
pub trait Membership: Send + Sync + Debug {
    /// Waits until all members are at the exchange of logical step `step`, and returns the round with its members. Workers that
    /// have joined since the last round are members from this round on; workers that have gone are not. A joining worker may name
    /// any step, since the round has the run's step; only the workers of the first epoch have to name the same one.
    ///
    /// After a boundary that was given up, the round may be of that earlier step: the worker votes [`Ballot::Failed`] on it, and
    /// calls again.
    ///
    /// # Errors
    /// [`Error::Refused`]: after a final refusal ([`Refusal::is_final`]) the worker is out of the run; after another one it may
    /// call again.
    /// [`Error::Undecided`] before the vote on the last round is answered, [`Error::Unanswered`], [`Error::Left`].
    /// [`Error::Alone`] or [`Refusal::Behind`]: the worker takes the step without an exchange. [`Error::Away`].
    fn boundary(&self, step: u64) -> Result<Round, Error>;

    /// Votes on the exchange and waits for the decision. A second call asks for the decision again; the first ballot stands.
    ///
    /// # Errors
    /// As for [`boundary`](Membership::boundary). Without a decision the caller must not apply any result of the exchange.
    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, Error>;

    /// Returns the decision on `round` if it is known before this worker has voted: a member is gone, so the exchange need not be
    /// waited for. Does not wait.
    fn decided(&self, round: &Round) -> Option<Decision>;

    /// Ends the membership. Between a boundary and its vote, leaving aborts the exchange of the others.
    ///
    /// # Errors
    /// [`Error::Unanswered`] after the [`deadline`](Membership::deadline): the others wait until the arbiter drops this worker as silent.
    fn leave(&self) -> Result<(), Error>;

    /// Longest time that a call waits for its answer. The worker's other ranks wait for twice as long for rank 0's answer. `None`:
    /// they wait as long as for any other operation.
    fn deadline(&self) -> Option<Duration> {
        None
    }
}
