//! What an arbiter knows for good: all that its successor needs.

use crate::message::{Digest, Worker};
use crate::round::{Decision, Departure, Gone, Round, Seat};
use crate::wire::{Wire, wire};

/// The whole of it, as one record of the log has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Which start of the arbiter wrote it, from 1.
    pub term: u64,
    /// What all workers have alike.
    pub digest: Digest,
    /// 0 before the first.
    pub epoch: u64,
    /// The last round granted; 0 before the first.
    pub round: u64,
    /// Its logical step.
    pub step: u64,
    /// What became of it; `None` while members vote.
    pub decision: Option<Decision>,
    /// The members of the epoch, by rank, those gone since it began too.
    pub members: Vec<Place>,
    /// Who was in the epoch before and is not in this one.
    pub gone: Vec<Former>,
}

/// A member of the epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Who.
    pub worker: Worker,
    /// For others to reach it by.
    pub contact: String,
    /// Whether its values count in means.
    pub counts: bool,
    /// Exchanges in a row that it vetoed.
    pub vetoes: usize,
    /// Since when it is none, if so: since after the last grant.
    pub gone: Option<Departure>,
}

/// A former member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Former {
    /// Who.
    pub worker: Worker,
    /// How it ceased to be one.
    pub why: Departure,
}

impl State {
    /// Before anything has happened.
    pub(super) fn new(digest: Digest) -> Self {
        State {
            term: 0,
            digest,
            epoch: 0,
            round: 0,
            step: 0,
            decision: None,
            members: Vec::new(),
            gone: Vec::new(),
        }
    }

    /// Whether members vote on an exchange.
    pub(super) fn is_open(&self) -> bool {
        self.round > 0 && self.decision.is_none()
    }

    /// The members that are not gone.
    pub(super) fn live(&self) -> impl Iterator<Item = &Place> {
        self.members.iter().filter(|place| place.gone.is_none())
    }

    /// The rank of a member that is not gone.
    pub(super) fn rank(&self, worker: Worker) -> Option<usize> {
        self.members.iter().position(|place| place.worker == worker && place.gone.is_none())
    }

    /// How this worker ceased to be a member, as far back as the last epoch.
    pub(super) fn departure(&self, worker: Worker) -> Option<Departure> {
        let here = self.members.iter().find(|place| place.worker == worker).and_then(|place| place.gone);
        here.or_else(|| self.gone.iter().find(|former| former.worker == worker).map(|former| former.why))
    }

    /// The last round as the member of rank `rank` is told of it.
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

    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        Wire::encode(self)
    }

    /// `None` for bytes that no state is written as.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Wire::decode(bytes)
    }
}

wire!(struct State { term, digest, epoch, round, step, decision, members, gone });
wire!(struct Place { worker, contact, counts, vetoes, gone });
wire!(struct Former { worker, why });
