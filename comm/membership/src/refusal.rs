//! Why a worker does not get what it asked an arbiter for.

use crate::round::Departure;
use crate::wire::wire;

/// Why the arbiter refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The worker's plan is not the run's.
    #[error(
        "this worker's plan has digest {mine:016x}, the run's {run:016x}; give every worker the same plan"
    )]
    OtherPlan {
        /// The worker's.
        mine: u64,
        /// The run's.
        run: u64,
    },
    /// The worker's update rule is not the run's.
    #[error(
        "this worker's rule has digest {mine:016x}, the run's {run:016x}; give every worker the same rule and hyperparameters"
    )]
    OtherRule {
        /// The worker's.
        mine: u64,
        /// The run's.
        run: u64,
    },
    /// There is a worker of that id.
    #[error(
        "a worker {id} is in the run; give each its own id, or wait until the arbiter has missed the old one"
    )]
    IdTaken {
        /// The id.
        id: u64,
    },
    /// What others are to reach it by is too long.
    #[error("a contact of {len} bytes; at most {max} are kept")]
    Contact {
        /// Its bytes.
        len: usize,
        /// As many as there may be.
        max: usize,
    },
    /// There are as many workers as there can be.
    #[error("the run has {max} workers, all it takes")]
    Full {
        /// That many.
        max: usize,
    },
    /// The worker was a member and is none any more.
    #[error(
        "this worker was a member up to epoch {epoch} and is none in epoch {now}{}; its state is its own now: join anew",
        Because(.why)
    )]
    Fenced {
        /// The last epoch that it knows of.
        epoch: u64,
        /// The run's epoch.
        now: u64,
        /// How it ceased to be one, while that is remembered.
        why: Option<Departure>,
    },
    /// Nobody is left who has the run's state.
    #[error(
        "nobody is left who has the state of step {step}; begin a new run, with a new log, from the last checkpoint"
    )]
    StateLost {
        /// The last exchange's step.
        step: u64,
    },
    /// Fewer workers than the run goes on with, for as long as it waits. The worker stays a member.
    #[error("{have} workers are there, and the run goes on with {min}; wait once more, or allow fewer")]
    TooFew {
        /// As many came.
        have: usize,
        /// `min_workers`.
        min: usize,
    },
    /// Members want to exchange at different steps, and none is that of most. They stay members.
    #[error(
        "worker {id} is at step {step}, worker {other} at step {other_step}; members exchange at the same steps"
    )]
    Disagree {
        /// One.
        id: u64,
        /// Its step.
        step: u64,
        /// Another.
        other: u64,
        /// Its step.
        other_step: u64,
    },
    /// The exchange of that step, or a later one, was committed. The worker stays a member.
    #[error(
        "the exchange of step {step} was committed; the next is of a later step than that, not of {asked}"
    )]
    Passed {
        /// The step asked for.
        asked: u64,
        /// The last exchange's step.
        step: u64,
    },
}

impl Refusal {
    /// Whether the worker may go on asking.
    pub fn is_final(&self) -> bool {
        !matches!(self, Refusal::TooFew { .. } | Refusal::Disagree { .. } | Refusal::Passed { .. })
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
});
