//! Outcome of a step, known at once on the CPU and later on a GPU.

use crate::error::Error;
use crate::step::gpu::StepTicket;
use std::sync::Arc;

/// A step taken on this rank. On the CPU its outcome is already known; a GPU decides the step when its queue reaches it.
#[derive(Debug)]
#[must_use = "the outcome says whether the step was applied or skipped"]
pub struct Pending(PendingState);

#[derive(Debug)]
enum PendingState {
    Ready(Outcome),
    Deferred(Arc<StepTicket>),
}

impl Pending {
    /// Returns what the step did, the same on every rank except for the traffic. On a GPU it waits for the step, and returns the
    /// errors that all ranks share.
    pub fn outcome(self) -> Result<Outcome, Error> {
        match self.0 {
            PendingState::Ready(outcome) => Ok(outcome),
            PendingState::Deferred(ticket) => ticket.outcome(),
        }
    }
}

/// A step with a known outcome.
impl From<Outcome> for Pending {
    fn from(outcome: Outcome) -> Self {
        Pending(PendingState::Ready(outcome))
    }
}

/// A step that a GPU decides.
impl From<Arc<StepTicket>> for Pending {
    fn from(ticket: Arc<StepTicket>) -> Self {
        Pending(PendingState::Deferred(ticket))
    }
}

/// Outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// The step updated parameters and state.
    Applied {
        /// Norm of the whole combined gradient before clipping; infinite if some elements were not finite and
        /// [`NonFinite::Propagate`](crate::NonFinite::Propagate) took the step nevertheless.
        norm: f64,
        /// Factor that clipped the combined gradient; 1 if its norm was within the bound, or if each rank clips its own.
        coef: f64,
        /// True if some rank was asked to end the run before it decided this step ([`Options::preemption`](crate::Options::preemption)).
        preempted: bool,
        /// Bytes moved and held.
        traffic: Traffic,
    },
    /// Some gradient was not finite: parameters, state and counters are unchanged, and the gradients are dropped.
    Skipped {
        /// Number of combined gradient elements that were not finite; elements that several groups of ranks replicate count in
        /// each group.
        non_finite: u64,
        /// Steps skipped in a row, including this one.
        in_a_row: u32,
        /// True if some rank was asked to end the run, as for a step that is applied.
        preempted: bool,
        /// Bytes moved and held.
        traffic: Traffic,
    },
}

impl Outcome {
    /// Returns true if some rank was asked to end the run before it decided this step: the same on every rank. The run then saves a
    /// checkpoint and ends, and every later step returns true again.
    pub fn preempted(&self) -> bool {
        let (Outcome::Applied { preempted, .. } | Outcome::Skipped { preempted, .. }) = self;
        *preempted
    }
}

/// Bytes of one step on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Bytes sent by this rank's communicators since the last step, as ring algorithms send them.
    pub sent: u64,
    /// Gradient bytes copied into buckets; 0 if all gradients were written into their slots.
    pub copied: u64,
    /// Peak bytes of all categories together so far, by the options' meter.
    pub peak: u64,
    /// Bucket buffers added so far because gradients came out of bucket order (stages 2 and 3).
    pub pool_grown: u64,
}
