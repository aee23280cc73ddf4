//! What the members of an epoch are told at a boundary, and what becomes of the exchange there.

use crate::wire::wire;

/// One exchange that the arbiter has granted: when, and among whom. The same on every member but for `rank`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Round {
    /// Its number, never used for another exchange.
    pub number: u64,
    /// How often the members, or what joins them, have changed: the generation of their communicators. Whoever has
    /// communicators of another makes new ones.
    pub epoch: u64,
    /// The logical step, which one that has just joined learns here.
    pub step: u64,
    /// This worker's rank in the epoch.
    pub rank: usize,
    /// Who takes part, by rank: those that were there before in the order they had, then those that join.
    pub members: Vec<Seat>,
    /// Who was in the epoch before, and is not in this one.
    pub gone: Vec<Gone>,
}

impl Round {
    /// Whether this worker's values count in means. While they do not it takes over the state of
    /// [`source`](Round::source) before the exchange, to which it adds nothing.
    pub fn counts(&self) -> bool {
        self.members[self.rank].counts
    }

    /// What a sum over the members is divided by for their mean: how many count.
    pub fn divisor(&self) -> usize {
        self.members.iter().filter(|seat| seat.counts).count()
    }

    /// The rank that gives its state to those that do not count yet: the first that counts.
    pub fn source(&self) -> usize {
        // An epoch has a member that counts: the arbiter grants no other.
        self.members.iter().position(|seat| seat.counts).unwrap_or_default()
    }

    /// Whether anybody takes over state in this round.
    pub fn has_joiners(&self) -> bool {
        self.members.iter().any(|seat| !seat.counts)
    }
}

/// A member of an epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    /// The worker's id.
    pub id: u64,
    /// Whether it has completed an exchange, or was there at the first: before, it has no weight. A round in which nothing was
    /// exchanged ([`Decision::Idle`]) completes none.
    pub counts: bool,
    /// What it said when it joined, for others to reach it by.
    pub contact: String,
}

/// Somebody who is not a member any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// The worker's id.
    pub id: u64,
    /// How that came.
    pub why: Departure,
}

/// How a worker ceased to be a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Departure {
    /// It said so.
    #[error("it left")]
    Left,
    /// It gave no sign for too long, or its thread ended without a word.
    #[error("it was not heard of any more")]
    Silent,
    /// It gave signs, but kept the others waiting too long at a boundary or for its vote.
    #[error("it kept the others waiting too long")]
    Late,
    /// It vetoed three exchanges in a row.
    #[error("it vetoed three exchanges in a row")]
    Vetoed,
    /// It came to a boundary at another step than most of the members that count.
    #[error("it was at step {step} where most members were at step {others}")]
    OutOfStep {
        /// Its step.
        step: u64,
        /// Theirs.
        others: u64,
    },
}

/// A worker's word on an exchange, of everything due in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ballot {
    /// The results are here and can be applied.
    Ready,
    /// There was nothing to exchange any more: what was on its way was given up as members changed.
    Idle,
    /// This worker's own part is at fault, as with a number that is not finite; three in a row, and it is dropped.
    Veto,
    /// The exchange failed here; whose fault that is nobody knows. Communicators are made anew.
    Failed,
}

/// What became of an exchange, the same for all members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Every member applies it.
    Commit {},
    /// There was nothing to apply, by the word of at least one member: who was ready drops its results, and who has only just
    /// joined does not count yet.
    Idle {},
    /// No member applies anything of it.
    Abort {
        /// Who vetoed it, by id.
        vetoed: Vec<u64>,
        /// For whom it failed.
        failed: Vec<u64>,
        /// Who was gone before it had voted.
        lost: Vec<u64>,
    },
}

impl Decision {
    /// Whether the exchange is applied.
    pub fn is_commit(&self) -> bool {
        matches!(self, Decision::Commit {})
    }

    /// Whether the communicators of its epoch are of no more use.
    pub(super) fn broke(&self) -> bool {
        matches!(self, Decision::Abort { failed, lost, .. } if !failed.is_empty() || !lost.is_empty())
    }
}

wire!(struct Round { number, epoch, step, rank, members, gone });
wire!(struct Seat { id, counts, contact });
wire!(struct Gone { id, why });
wire!(enum Departure { 1 => Left {}, 2 => Silent {}, 3 => Late {}, 4 => Vetoed {}, 5 => OutOfStep { step, others } });
wire!(enum Ballot { 1 => Ready {}, 2 => Veto {}, 3 => Failed {}, 4 => Idle {} });
wire!(enum Decision { 1 => Commit {}, 2 => Abort { vetoed, failed, lost }, 3 => Idle {} });
