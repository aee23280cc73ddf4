//! Reasons for which an arbiter refuses a request.

use crate::round::Departure;
use crate::wire::wire;

/// Reason for a refusal.
///
/// ```
/// use meshstep_comm::Clock;
/// use meshstep_membership::{Config, ConfigError, ConnectionError, Departure, Digest, Error, Former, Gone, InProcess, LogError, Refusal};
/// use std::time::Duration;
///
/// /// Returns what a program does next.
/// fn next(error: &Error) -> &'static str {
///     match error {
///         Error::Refused(Refusal::Fenced { .. }) => "join again: the others went on without this worker",
///         Error::Refused(Refusal::IdTaken { .. }) => "wait until the arbiter drops the old worker of this id",
///         Error::Connection(ConnectionError::WrongToken { .. }) => "give all processes one token",
///         Error::Log(LogError::Locked { .. }) => "end the other arbiter of this log",
///         error => error.to_string().leak(),
///     }
/// }
///
/// let digest = Digest { plan: 1, rule: 2 };
/// let nobody = InProcess::new(Config { min_workers: 0, ..Config::new(digest, 1) }, Clock::real());
/// assert!(matches!(nobody, Err(Error::Config(ConfigError::Workers { min_workers: 0, .. }))));
/// let run = InProcess::new(Config::new(digest, 1), Clock::real())?;
/// let worker = run.join(7, digest, Duration::from_secs(60))?;
/// let again = run.join(7, digest, Duration::from_secs(60)).map(drop).unwrap_err();
/// assert!(next(&again).starts_with("wait"), "{again}");
///
/// // Rounds and states name former members with the reason.
/// let gone = |Gone { id, why }: &Gone| format!("worker {id}: {why}");
/// assert_eq!(gone(&Gone { id: 3, why: Departure::Late }), "worker 3: it kept the others waiting too long");
/// let former = |Former { worker, why }: &Former| format!("worker {}: {why}", worker.id);
/// # let _ = former;
/// # drop(worker);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The worker's plan differs from the run's.
    #[error(
        "this worker's plan has digest {mine:016x}, the run's {run:016x}; give every worker the same plan"
    )]
    OtherPlan {
        /// Digest of the worker.
        mine: u64,
        /// Digest of the run.
        run: u64,
    },
    /// The worker's update rule differs from the run's.
    #[error(
        "this worker's rule has digest {mine:016x}, the run's {run:016x}; give every worker the same rule and hyperparameters"
    )]
    OtherRule {
        /// Digest of the worker.
        mine: u64,
        /// Digest of the run.
        run: u64,
    },
    /// A worker with the same id is in the run.
    #[error(
        "a worker with id {id} is in the run; give each worker its own id, or wait until the arbiter drops the old one"
    )]
    IdTaken {
        /// The id.
        id: u64,
    },
    /// The contact, the address by which others reach the worker, is too long.
    #[error("the contact has {len} bytes; at most {max} are allowed")]
    Contact {
        /// Length in bytes.
        len: usize,
        /// Largest length in bytes.
        max: usize,
    },
    /// The run has as many workers as it takes.
    #[error("the run already has {max} workers, the most that it takes")]
    Full {
        /// Most workers that a run takes.
        max: usize,
    },
    /// The worker was a member and is not one any more.
    #[error(
        "this worker was a member up to epoch {epoch} and is not one in epoch {now}{}; its state has diverged: join again",
        Because(.why)
    )]
    Fenced {
        /// Last epoch that the worker knows of.
        epoch: u64,
        /// The run's epoch.
        now: u64,
        /// How the worker ceased to be a member, as long as the arbiter keeps it.
        why: Option<Departure>,
    },
    /// No member with the run's state is left.
    #[error(
        "no worker with the state of step {step} is left; begin a new run, with a new log, from the last checkpoint"
    )]
    StateLost {
        /// Step of the last exchange.
        step: u64,
    },
    /// After `patience` there are fewer workers than `min_workers`. The worker stays a member.
    #[error("{have} workers arrived, but the run needs {min}; call again, or lower min_workers")]
    TooFew {
        /// Number of workers at the boundary.
        have: usize,
        /// `min_workers`.
        min: usize,
    },
    /// The founders of a run named different steps. The worker stays a founder.
    #[error(
        "worker {id} is at step {step}, worker {other} at step {other_step}; all founders must begin at the same step"
    )]
    Disagree {
        /// Id of one worker.
        id: u64,
        /// Step of that worker.
        step: u64,
        /// Id of another worker.
        other: u64,
        /// Step of the other worker.
        other_step: u64,
    },
    /// The member is behind the others. It stays a member, and goes on without an exchange until it is at their step.
    #[error(
        "this worker is at step {step}, the others wait for it at step {others}; go on to that step without an exchange"
    )]
    Behind {
        /// Step of the worker.
        step: u64,
        /// Step of the others.
        others: u64,
    },
    /// All members ask for a step whose exchange, or a later one, was committed. The worker stays a member. A member that asks alone for
    /// such a step is not refused at once: it waits until the others arrive, and is then [`Fenced`](Self::Fenced) as out of step.
    #[error("the exchange of step {step} is committed already; ask for a later step, not for {asked}")]
    Passed {
        /// The step asked for.
        asked: u64,
        /// Step of the last exchange.
        step: u64,
    },
}

meshstep_comm::debug_is_display!(Refusal);

impl Refusal {
    /// Returns true if the worker is out of the run; after other refusals it may ask again.
    pub fn is_final(&self) -> bool {
        use Refusal::{Behind, Disagree, Passed, TooFew};
        !matches!(self, TooFew { .. } | Disagree { .. } | Passed { .. } | Behind { .. })
    }
}

struct Because<'a>(&'a Option<Departure>);

impl std::fmt::Display for Because<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.map_or(Ok(()), |why| write!(f, " because {why}"))
    }
}

wire!(enum Refusal {
    1 => OtherPlan { mine, run },
    2 => OtherRule { mine, run },
    3 => IdTaken { id },
    4 => Contact { len, max },
    5 => Full { max },
    6 => Fenced { epoch, now, why },
    7 => StateLost { step },
    8 => TooFew { have, min },
    9 => Disagree { id, step, other, other_step },
    10 => Passed { asked, step },
    11 => Behind { step, others },
});
