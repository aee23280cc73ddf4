//! Messages between workers and the arbiter. Every message may be lost or come twice: workers repeat unanswered requests.

use crate::Refusal;
use crate::round::{Ballot, Decision, Round};
use crate::wire::{Wire, wire};
use std::time::Duration;

/// One start of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Worker {
    /// Worker id, unique among the workers of a run at any time.
    pub id: u64,
    /// Number of this start, used by no other start of the worker: it distinguishes a restarted process from the stopped one.
    pub life: u64,
}

/// Digests of the plan and of the update rule, which all workers must share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    /// Digest of the plan: the tensors that are exchanged at each step.
    pub plan: u64,
    /// Digest of the rule with its hyperparameters.
    pub rule: u64,
}

/// Message from a worker. `term` and `epoch` are the highest that the worker knows of: an arbiter with a lower one is superseded. An
/// arbiter that does not know the end of round `after` has an incomplete log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToArbiter {
    /// Sender.
    pub worker: Worker,
    /// Term of the arbiter that the worker last received a message from.
    pub term: u64,
    /// Last epoch of which the worker was a member; 0 for none.
    pub epoch: u64,
    /// Last round with an end that the worker knows; 0 for none.
    pub after: u64,
    /// Request.
    pub ask: Ask,
}

/// Request of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Asks for membership.
    Join {
        /// Digest of the worker's plan and rule.
        digest: Digest,
        /// Address by which others reach the worker.
        contact: String,
    },
    /// Renews the lease.
    Beat {
        /// Send time on the worker's clock, returned with the acknowledgement.
        sent: Duration,
    },
    /// Asks for an exchange at a step.
    Arrive {
        /// Number of this request.
        request: u64,
        /// Logical step.
        step: u64,
    },
    /// Votes on an exchange and asks for the decision.
    Vote {
        /// Round number.
        round: u64,
        /// The worker's ballot.
        ballot: Ballot,
    },
    /// Asks to leave.
    Leave,
}

/// Message from an arbiter. Workers ignore messages of an earlier term.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FromArbiter {
    /// Recipient.
    pub to: Worker,
    /// Number of this start of the arbiter, from 1.
    pub term: u64,
    /// Content.
    pub word: Word,
}

/// Content of an arbiter's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// The worker is admitted and may come to a boundary.
    Welcome,
    /// Acknowledges a beat.
    Heard {
        /// Send time of the beat on the worker's clock.
        sent: Duration,
        /// Time from `sent` for which the worker stays a member.
        lease: Duration,
    },
    /// Grants an exchange.
    Granted {
        /// The exchange and its members.
        round: Round,
    },
    /// Reports the decision on an exchange.
    Decided {
        /// Round number.
        round: u64,
        /// Decision of the arbiter.
        decision: Decision,
    },
    /// Confirms that the worker has left.
    Farewell,
    /// Refuses a request.
    Refused {
        /// Number of the refused [`Ask::Arrive`]; 0 for other requests.
        request: u64,
        /// Reason for the refusal.
        refusal: Refusal,
    },
}

impl ToArbiter {
    /// Encodes the message as bytes.
    pub fn encode(&self) -> Vec<u8> {
        Wire::encode(self)
    }

    /// Decodes a message; `None` if the bytes are not a valid one.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Wire::decode(bytes)
    }
}

impl FromArbiter {
    /// Encodes the message as bytes.
    pub fn encode(&self) -> Vec<u8> {
        Wire::encode(self)
    }

    /// Decodes a message; `None` if the bytes are not a valid one.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Wire::decode(bytes)
    }
}

wire!(struct Worker { id, life });
wire!(struct Digest { plan, rule });
wire!(struct ToArbiter { worker, term, epoch, after, ask });
wire!(struct FromArbiter { to, term, word });
wire!(enum Ask {
    1 => Join { digest, contact },
    2 => Beat { sent },
    3 => Arrive { request, step },
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
