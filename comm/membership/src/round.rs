//! A granted exchange, the members' ballots and the decision on it.

use crate::wire::wire;

/// One exchange that the arbiter has granted. Every member gets the same values but for `rank`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Round {
    /// Round number, never used for another exchange.
    pub number: u64,
    /// Generation of the communicators: it changes with the members, and after an exchange that left the communicators unusable. A
    /// worker with communicators of another epoch makes new ones.
    pub epoch: u64,
    /// Logical step; a worker that has just joined learns it here.
    pub step: u64,
    /// This worker's rank in the epoch.
    pub rank: usize,
    /// Members by rank: the remaining ones in their previous order, then the joining ones.
    pub members: Vec<Seat>,
    /// Members of the previous epoch that are not in this one.
    pub gone: Vec<Gone>,
}

impl Round {
    /// Returns true if this worker's values count in means. A worker that does not count takes over the state of
    /// [`source`](Round::source) before the exchange and adds nothing to the sums.
    pub fn counts(&self) -> bool {
        self.members[self.rank].counts
    }

    /// Returns the number of members that count: a sum over the members is divided by it for their mean.
    pub fn divisor(&self) -> usize {
        self.members.iter().filter(|seat| seat.counts).count()
    }

    /// Returns the rank that gives its state to those that do not count yet: the first that counts.
    pub fn source(&self) -> usize {
        // An epoch has a member that counts: the arbiter grants no other.
        self.members.iter().position(|seat| seat.counts).unwrap_or_default()
    }

    /// Returns true if any member takes over state in this round.
    pub fn has_joiners(&self) -> bool {
        self.members.iter().any(|seat| !seat.counts)
    }
}

/// A member of an epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    /// The worker's id.
    pub id: u64,
    /// True once the worker has completed an exchange, or if it was a member at the first; before, its values have no weight. A
    /// round in which nothing was exchanged ([`Decision::Idle`]) does not complete one.
    pub counts: bool,
    /// Address that the worker gave when it joined, for others to reach it.
    pub contact: String,
}

/// A former member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// The worker's id.
    pub id: u64,
    /// How the worker ceased to be a member.
    pub why: Departure,
}

/// How a worker ceased to be a member.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Departure {
    /// The worker asked to leave.
    #[error("it left")]
    Left,
    /// No message came from the worker for too long, or its thread ended without leaving.
    #[error("no message came from it in time")]
    Silent,
    /// The worker sent beats, but kept the others waiting too long at a boundary or for its vote.
    #[error("it kept the others waiting too long")]
    Late,
    /// The worker vetoed three exchanges in a row.
    #[error("it vetoed three exchanges in a row")]
    Vetoed,
    /// The worker came to a boundary at another step than most of the members that count.
    #[error("it was at step {step} where most members were at step {others}")]
    OutOfStep {
        /// Step of the worker.
        step: u64,
        /// Step of most members.
        others: u64,
    },
}

meshstep_comm::debug_is_display!(Departure);

/// A worker's vote on an exchange: one ballot for everything due in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ballot {
    /// The results have arrived and can be applied.
    Ready,
    /// There was nothing left to exchange: transfers in flight were given up as members changed.
    Idle,
    /// This worker's own contribution is at fault, for example not finite; after three in a row the worker is dropped.
    Veto,
    /// The exchange failed on this worker for an unknown cause. Communicators are made anew.
    Failed,
}

/// Decision on an exchange, the same for all members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Every member applies the exchange.
    Commit {},
    /// At least one member had nothing to apply: ready members drop their results, and a member that has just joined does not count
    /// yet.
    Idle {},
    /// No member applies any part of the exchange.
    Abort {
        /// Ids of workers that voted [`Ballot::Veto`].
        vetoed: Vec<u64>,
        /// Ids of workers that voted [`Ballot::Failed`].
        failed: Vec<u64>,
        /// Ids of workers that were gone before they had voted.
        lost: Vec<u64>,
    },
}

impl Decision {
    /// Returns true if the exchange is applied.
    pub fn is_commit(&self) -> bool {
        matches!(self, Decision::Commit {})
    }

    /// Returns true if the epoch's communicators are unusable after this decision.
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
