//! Who takes part in an exchange, while workers come and go.
//!
//! | item | what it is |
//! |---|---|
//! | [`Membership`] | what a training loop calls: a boundary before every exchange, a vote after it |
//! | [`InProcess`] | for workers that are threads of one process |
//! | [`Service`], [`Remote`] | for workers that are processes: the arbiter, with its log, and their calls to it over TCP |
//! | [`Round`] | an exchange that was granted: the step, the members, who counts, which communicators |
//! | [`Decision`] | what became of it, the same for every member |
//! | [`Arbiter`], [`Member`] | both sides as machines without clock and sockets, for other transports |
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
//!     let round = worker.boundary(step)?; // waits for the other members; who has joined or gone is known here
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
//! # What is promised
//!
//! - Members of a round get the same decision on it, and a commit only if all of them voted ready. It is in the arbiter's log
//!   before anybody hears of it, so that its successor says the same.
//! - A step's exchange is committed once at most. After an abort the same step, or a later one, is asked for again.
//! - An epoch's number is that of one list of members; communicators are made once for each.
//! - A worker that does not come, vote or give signs in time is waited for until a deadline of the arbiter's and not after it. Every
//!   call returns within the worker's own deadline, whatever happens to the arbiter.
//! - A worker that is no member any more gets [`Refusal::Fenced`], even if it has stood still and what it hears was true once.
//!
//! # How
//!
//! The arbiter has one record, [`State`]. Every change of it is logged as a whole, then said. Workers repeat what they ask until it
//! is answered, and asking twice is asking once. Every message of a worker has the highest term (start of the arbiter) and
//! epoch that it knows of, every message of an arbiter its term; whoever is behind is not listened to.
//!
//! # Limits
//!
//! - Between processes, what the rendezvous says of its own connections: proven by the job's token, sealed, not encrypted.
//! - One arbiter: while it is down, exchanges wait for its successor; steps between them do not.
//! - At most 256 workers.
//! - Workers that lie about who they are, or vote ready without being, are believed.

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
mod tcp_arbiter;
mod tcp_worker;
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
pub use tcp_arbiter::Service;
pub use tcp_worker::{Caller, Remote};

use std::fmt::Debug;
use std::time::Duration;

/// A worker's place in a run whose workers come and go.
///
/// Between two exchanges nothing is called. At each the loop calls [`boundary`](Membership::boundary), exchanges with the members
/// it names, calls [`vote`](Membership::vote), and applies everything or nothing by what that returns. One call is made at a
/// time.
pub trait Membership: Send + Sync + Debug {
    /// Waits until all members are at the exchange of logical step `step`, and says among whom it is. Whoever has joined since
    /// is a member from here on, and whoever has gone is none. A worker that was none yet may name any step: the round says
    /// which it is, unless it is one of the first, who name the same.
    ///
    /// # Errors
    /// [`Error::Refused`]: by a final refusal ([`Refusal::is_final`]) the worker is out of the run; after others it may call again.
    /// [`Error::Undecided`] before the vote on the last round is answered, [`Error::Unanswered`], [`Error::Left`].
    fn boundary(&self, step: u64) -> Result<Round, Error>;

    /// Gives this worker's word on the exchange, and waits for what becomes of it. Called again it asks again: the first word
    /// stands.
    ///
    /// # Errors
    /// As for [`boundary`](Membership::boundary); while no decision is heard nothing of the exchange may be applied.
    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, Error>;

    /// What became of `round`, where that is known before this worker has voted: a member is gone, so that the exchange need not
    /// be waited for. Does not wait.
    fn decided(&self, round: &Round) -> Option<Decision>;

    /// Ends the membership. Between a boundary and its vote it costs the others that exchange.
    ///
    /// # Errors
    /// [`Error::Unanswered`]: the others wait until they miss it.
    fn leave(&self) -> Result<(), Error>;

    /// How long a call waits for its answer, where that has an end: ranks that wait for what this one hears wait for twice as
    /// long. `None`: they wait as long as for any operation of theirs.
    fn deadline(&self) -> Option<Duration> {
        None
    }
}
