//! Durable state of an arbiter: all that its successor needs.

use crate::message::{Digest, Worker};
use crate::round::{Decision, Departure, Gone, Round, Seat};
use crate::wire::{Wire, wire};

/// Bits of a term that count the starts since the last promotion.
const STARTS: u32 = 32;

/// The state as written in one record of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Number of the arbiter's start that wrote the state, from 1; the upper 32 bits are the number of promotions of a standby.
    pub term: u64,
    /// Digest shared by all workers; `None` until one is known.
    pub digest: Option<Digest>,
    /// Last epoch; 0 before the first.
    pub epoch: u64,
    /// The last round granted; 0 before the first.
    pub round: u64,
    /// Logical step of the last round.
    pub step: u64,
    /// Decision on the last round; `None` while members vote.
    pub decision: Option<Decision>,
    /// Members of the epoch by rank, including those that have gone since it began.
    pub members: Vec<Place>,
    /// Members of the previous epoch that are not in this one.
    pub gone: Vec<Former>,
}

/// A member of the epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Worker id and start number.
    pub worker: Worker,
    /// Address by which others reach the worker.
    pub contact: String,
    /// True if its values count in means.
    pub counts: bool,
    /// Exchanges in a row that the worker vetoed.
    pub vetoes: usize,
    /// How the worker ceased to be a member, if it has done so since the last grant.
    pub gone: Option<Departure>,
}

/// A former member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Former {
    /// Worker id and start number.
    pub worker: Worker,
    /// How the worker ceased to be a member.
    pub why: Departure,
}

impl State {
    /// Returns the state before the first epoch.
    pub(super) fn new() -> Self {
        State {
            term: 0,
            digest: None,
            epoch: 0,
            round: 0,
            step: 0,
            decision: None,
            members: Vec::new(),
            gone: Vec::new(),
        }
    }

    /// Raises the term above those that the starts of other arbiters reach.
    pub(super) fn promote(&mut self) {
        self.term = ((self.term >> STARTS) + 1) << STARTS;
    }

    /// Returns true if `other`, a state of the same run, is older or lacks what this one has.
    pub(super) fn knows_more_than(&self, other: &State) -> bool {
        let ended = |state: &State| (state.round, !state.is_open());
        self.term > other.term || self.epoch > other.epoch || ended(self) > ended(other)
    }

    /// Returns true while members vote on an exchange.
    pub(super) fn is_open(&self) -> bool {
        self.round > 0 && self.decision.is_none()
    }

    /// Iterates over the members that are not gone.
    pub(super) fn live(&self) -> impl Iterator<Item = &Place> {
        self.members.iter().filter(|place| place.gone.is_none())
    }

    /// Returns the rank of a member that is not gone.
    pub(super) fn rank(&self, worker: Worker) -> Option<usize> {
        self.members.iter().position(|place| place.worker == worker && place.gone.is_none())
    }

    /// Returns how this worker ceased to be a member; only the current and the previous epoch are known.
    pub(super) fn departure(&self, worker: Worker) -> Option<Departure> {
        let here = self.members.iter().find(|place| place.worker == worker).and_then(|place| place.gone);
        here.or_else(|| self.gone.iter().find(|former| former.worker == worker).map(|former| former.why))
    }

    /// Returns the last round as granted to the member of rank `rank`.
    pub(super) fn granted(&self, rank: usize) -> Round {
        let seat = |place: &Place| Seat {
            id: place.worker.id,
            counts: place.counts,
            contact: place.contact.clone(),
        };
        Round {
            number: self.round,
            epoch: self.epoch,
            step: self.step,
            rank,
            members: self.members.iter().map(seat).collect(),
            gone: self.gone.iter().map(|former| Gone { id: former.worker.id, why: former.why }).collect(),
        }
    }

    /// Encodes the state as bytes.
    pub fn encode(&self) -> Vec<u8> {
        Wire::encode(self)
    }

    /// Decodes a state; `None` if the bytes are not a valid one.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Wire::decode(bytes)
    }
}

wire!(struct State { term, digest, epoch, round, step, decision, members, gone });
wire!(struct Place { worker, contact, counts, vetoes, gone });
wire!(struct Former { worker, why });
