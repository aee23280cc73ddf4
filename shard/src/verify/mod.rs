//! Bitwise verification: ranks that should hold the same data do, and each rank still holds the data it wrote.
//!
//! | data | compared |
//! |---|---|
//! | parameters, frozen ones too | among the ranks that hold the parameter |
//! | state and masters | among the ranks that hold the same part: all of the above at stage 0, replicas of the shards at other stages |
//! | vectors that no other rank holds | with their hash from the end of their last update, if [`Optimizer::verify_every`](crate::Optimizer::verify_every) has kept it |
//! | reduced gradients | among the ranks that have the same at that point, by [`Optimizer::verify_gradients`](crate::Optimizer::verify_gradients) |
//! | `t`, steps, skips, hyperparameters | among all ranks; each step's exchange compares lr, scales, the step and a hyperparameter digest |

mod compare;
pub(crate) mod difference;
mod explain;
mod hash;
mod repair;
mod survey;

pub use difference::{Apart, Difference, Held, VerifyError};
pub use repair::Repaired;

pub(crate) use compare::describe_counters;
pub(crate) use survey::What;

use crate::error::Error;
use crate::ranks::roles::RankRoles;
use crate::reduce::reducer::GradReducer;
use crate::reduce::together::Begun;
use crate::update::params::Params;
use crate::update::values::VectorKind;
use compare::Seen;
use std::sync::Arc;
use std::time::Duration;
use survey::{Replicas, Slot, Survey};

/// Report of a verification that found no difference.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verified {
    /// Vectors compared with other ranks'; a parameter is one, and each of its state vectors.
    pub compared: usize,
    /// Vectors that only this rank holds, and that still have the hash it wrote.
    pub kept: usize,
    /// Vectors that only this rank holds, without a hash.
    pub unchecked: usize,
    /// Bytes of memory read on this rank.
    pub bytes: u64,
    /// Bytes sent by this rank.
    pub sent: u64,
    /// Duration on this rank.
    pub elapsed: Duration,
    /// Hash of each parameter's bits (at stage 3 of this rank's part of them), in registration order; of the gradients' bits
    /// after [`Optimizer::verify_gradients`](crate::Optimizer::verify_gradients).
    pub hashes: Vec<u64>,
}

/// State that verification keeps from call to call.
#[derive(Debug, Default)]
pub(crate) struct Verifier {
    /// Number of steps between verifications; 0: only on request.
    every: u64,
    /// Steps taken since the last one that verified.
    since: u64,
    /// Hashes from the last update of vectors that no other rank holds, by index in the survey.
    kept: Vec<Option<u64>>,
    replicas: Vec<Replicas>,
    /// Ranks that hold each vector of frozen parameters.
    pub(crate) frozen: Vec<Arc<RankRoles>>,
    pub(crate) last: Option<Verified>,
}

/// A comparison of one rank's vectors with the other ranks', or with hashes kept from their last update.
#[derive(Debug)]
pub(crate) struct Comparison<'a> {
    pub(crate) params: &'a mut Params,
    pub(crate) reducer: &'a mut GradReducer,
    pub(crate) verifier: &'a mut Verifier,
    /// Text from [`describe_counters`].
    pub(crate) counters: String,
}

impl Verifier {
    /// Returns true if the coming step verifies.
    pub(crate) fn is_due(&self) -> bool {
        self.every > 0 && self.since + 1 >= self.every
    }

    /// Makes every `steps`th step verify; 0: none does.
    pub(crate) fn set_every(&mut self, steps: u64) {
        (self.every, self.since) = (steps, 0);
    }

    /// Drops the hashes of vectors that no other rank holds.
    pub(crate) fn forget(&mut self) {
        self.kept.clear();
    }

    /// Counts a step that was taken. Returns true if some later step verifies.
    pub(crate) fn count_step(&mut self) -> bool {
        if self.every > 0 {
            // A due step has verified.
            self.since = if self.is_due() { 0 } else { self.since + 1 };
        }
        self.every > 0
    }
}

impl Comparison<'_> {
    /// Compares all vectors, and adds the cost to that of the call's beginning. Collective.
    pub(crate) fn run(&mut self, begun: Begun, what: What) -> Result<Verified, Error> {
        let _span = tracing::debug_span!("verify").entered();
        let before = self.reducer.sent();
        let verified = self.vectors(what);
        let sent = begun.sent + self.reducer.exclude_from_step(before);
        let verified = self.reducer.end_if_alone(verified)?;
        Ok(Verified { sent, elapsed: begun.at.elapsed(), ..verified })
    }

    fn vectors(&mut self, what: What) -> Result<Verified, Error> {
        if what == What::Grads {
            self.reducer.settle()?;
        }
        let survey = self.survey(what)?;
        let kept = if what == What::Held { self.verifier.kept.clone() } else { Vec::new() };
        let seen = self.compare(&survey, &kept)?;
        match self.first_anywhere(&seen.differs)? {
            Some(first) => {
                let difference = self.explain(&survey, &seen, &kept, first)?;
                tracing::error!(%difference, "ranks differ");
                Err(Box::new(difference).into())
            }
            None => Ok(report(&survey, &seen, &kept)),
        }
    }

    /// Keeps hashes of the vectors that no other rank holds.
    pub(crate) fn keep(&mut self) -> Result<(), Error> {
        self.verifier.forget();
        let survey = self.survey(What::Held)?;
        for item in &survey.items {
            let hash = if item.group.is_none() { Some(self.hash(item, None)?) } else { None };
            self.verifier.kept.push(hash);
        }
        Ok(())
    }
}

fn report(survey: &Survey, seen: &Seen, kept: &[Option<u64>]) -> Verified {
    let mut verified = Verified { bytes: seen.bytes, ..Verified::default() };
    for (i, item) in survey.items.iter().enumerate() {
        match (item.group, kept.get(i).copied().flatten()) {
            (Some(_), _) => verified.compared += 1,
            (None, Some(_)) => verified.kept += 1,
            (None, None) => verified.unchecked += 1,
        }
        if matches!(item.slot, Slot::Kept(VectorKind::Params) | Slot::Grads) {
            verified.hashes.push(seen.hashes[i]);
        }
    }
    verified
}
