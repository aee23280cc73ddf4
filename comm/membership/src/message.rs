//! What workers and the arbiter say to each other. Every message may be lost or come twice: what is asked is asked again.

use crate::Refusal;
use crate::round::{Ballot, Decision, Round};
use crate::wire::{Wire, wire};
use std::time::Duration;

/// A worker, in one of its lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Worker {
    /// Its name, one worker's at a time.
    pub id: u64,
    /// A number that no other start of it has, so that a process that was stopped is not taken for its successor.
    pub life: u64,
}

/// What workers must have alike: digests of the plan and of the update rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    /// Of the plan: what is exchanged when.
    pub plan: u64,
    /// Of the rule with its hyperparameters.
    pub rule: u64,
}

/// From a worker. `term` and `epoch` are the highest it knows of: an arbiter that knows of none as high is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToArbiter {
    /// Who.
    pub worker: Worker,
    /// Of the last arbiter it heard.
    pub term: u64,
    /// The last that it was a member of; 0 for none.
    pub epoch: u64,
    /// What.
    pub ask: Ask,
}

/// What a worker asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// To be let in.
    Join {
        /// What it goes by.
        digest: Digest,
        /// For others to reach it by.
        contact: String,
    },
    /// To stay.
    Beat {
        /// The worker's time, to be told back.
        sent: Duration,
    },
    /// To exchange at a step.
    Arrive {
        /// The number of this request.
        request: u64,
        /// The last round that it knows the end of.
        after: u64,
        /// The logical step.
        step: u64,
    },
    /// What becomes of an exchange.
    Vote {
        /// Which.
        round: u64,
        /// The worker's word on it.
        ballot: Ballot,
    },
    /// To go.
    Leave,
}

/// From an arbiter; one of an earlier term is not listened to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FromArbiter {
    /// To whom.
    pub to: Worker,
    /// Which start of the arbiter this is, from 1.
    pub term: u64,
    /// What.
    pub word: Word,
}

/// What an arbiter says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// It may come to a boundary.
    Welcome,
    /// A sign of life has arrived.
    Heard {
        /// The worker's time when it gave it.
        sent: Duration,
        /// From then on it stays for this long.
        lease: Duration,
    },
    /// An exchange among these.
    Granted {
        /// Which.
        round: Round,
    },
    /// What became of an exchange.
    Decided {
        /// Which.
        round: u64,
        /// What.
        decision: Decision,
    },
    /// It has left.
    Farewell,
    /// It does not get what it asked for.
    Refused {
        /// The request, where it was one to exchange.
        request: u64,
        /// Why.
        refusal: Refusal,
    },
}

impl ToArbiter {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        Wire::encode(self)
    }

    /// `None` for bytes that no message is written as.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Wire::decode(bytes)
    }
}

impl FromArbiter {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        Wire::encode(self)
    }

    /// `None` for bytes that no message is written as.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Wire::decode(bytes)
    }
}

wire!(struct Worker { id, life });
wire!(struct Digest { plan, rule });
wire!(struct ToArbiter { worker, term, epoch, ask });
wire!(struct FromArbiter { to, term, word });
wire!(enum Ask {
    1 => Join { digest, contact },
    2 => Beat { sent },
    3 => Arrive { request, after, step },
    4 => Vote { round, ballot },
    5 => Leave {},
});
wire!(enum Word {
    1 => Welcome {},
    2 => Heard { sent, lease },
    3 => Granted { round },
    4 => Decided { round, decision },
    5 => Farewell {},
    6 => Refused { request, refusal },
});
