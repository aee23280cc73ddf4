//! Bitwise verification: ranks that should hold the same data do, and each rank still holds the data it wrote.
//!
//! | data | compared |
//! |---|---|
//! | parameters, frozen ones too | among the ranks that hold the parameter |
//! | state and masters | among the ranks that hold the same part: all of the above at stage 0, replicas of the shards at other stages |
//! | vectors that no other rank holds | with their hash from the end of their last update, if [`Optimizer::verify_every`] has kept it |
//! | reduced gradients | among the ranks that have the same at that point, by [`Optimizer::verify_gradients`] |
//! | `t`, steps, skips, hyperparameters | among all ranks; each step's exchange compares lr, scales, the step and a hyperparameter digest |

mod compare;
mod difference;
mod explain;
mod hash;
mod repair;
mod survey;

pub use difference::{Apart, Difference, Held, VerifyError};
pub use repair::Repaired;
pub(crate) use survey::Replicas;
#[cfg(feature = "checkpoint")]
pub(crate) use survey::{Item, Slot};

use crate::ranks::roles::know;
use crate::{Clip, Error, Optimizer, RankRoles};
use compare::Seen;
use meshstep_comm::{Communicator, name_calls};
use std::sync::Arc;
use std::time::{Duration, Instant};
use survey::{Survey, What};

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
    /// after [`Optimizer::verify_gradients`].
    pub hashes: Vec<u64>,
}

/// State that verification keeps from call to call.
#[derive(Debug, Default)]
pub(crate) struct Verifying {
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

impl Optimizer {
    /// Compares parameters and state between two steps, and changes nothing. Collective. A difference is [`Error::Differs`], the
    /// same on every rank; training may continue after it.
    ///
    /// Reads all memory once, and reduces two words of each vector over the n ranks that hold the same: a ring sends 16 ·
    /// 2(n-1)/n bytes for them. A vector that only this rank holds is compared with its kept hash, if there is one; [`Verified`]
    /// counts both cases. On a GPU values are copied to the host, 2^20 elements at a time, and hashed there.
    pub fn verify(&mut self) -> Result<Verified, Error> {
        let _name = name_calls("Optimizer::verify");
        self.reducer.healthy()?;
        let ready = self.between_steps();
        let begun = self.call_together("verify", ready)?;
        let verified = self.verified_by(begun, |all| all.verify_vectors(What::Held))?;
        self.verifying.last = Some(verified.clone());
        Ok(verified)
    }

    /// Makes every `steps`th [`step`](Self::step) verify once its gradients have arrived, before it changes anything; 0: none
    /// does. Collective, and checked. A difference is the step's error, which drops its gradients; the next step verifies again.
    ///
    /// Hashes of vectors that only this rank holds (sharded state, parts of parameters without replicas) are kept from the end of
    /// the update before a verification, which reads those vectors once more. With `steps` 1 that is every update, so they are
    /// watched all the time; otherwise they are watched between that update and the verification. On a GPU the host waits for
    /// such steps.
    pub fn verify_every(&mut self, steps: u64) -> Result<(), Error> {
        let _name = name_calls("Optimizer::verify_every");
        self.reducer.healthy()?;
        let ready = self.between_steps();
        self.call_together(&format!("verify every {steps} steps"), ready)?;
        (self.verifying.every, self.verifying.since) = (steps, 0);
        self.apart_from_steps(Self::keep_if_due).map(drop)
    }

    /// Returns the report of the last verification of parameters and state, if it found no difference.
    pub fn verified(&self) -> Option<&Verified> {
        self.verifying.last.as_ref()
    }

    /// Compares reduced gradients, between the last micro-batch's `finish` and [`step`](Self::step), among the ranks that have
    /// the same at that point: ranks of [`RankRoles::replicas`] with one place along each of [`RankRoles::extra_reductions`], the later reductions,
    /// and at stages 1 to 3 with one place among [`RankRoles::shards`]. Gradients that no other rank has are [`Verified::unchecked`].
    /// Collective; changes nothing.
    pub fn verify_gradients(&mut self) -> Result<Verified, Error> {
        let _name = name_calls("Optimizer::verify_gradients");
        self.reducer.healthy()?;
        let ready = self.gradients_are_on_gpu();
        let begun = self.call_together("verify gradients", ready)?;
        self.verified_by(begun, |all| {
            all.reducer.settle()?;
            all.verify_vectors(What::Grads)
        })
    }

    fn between_steps(&mut self) -> Result<(), Error> {
        self.finish_dropped()?;
        self.check_heard()?;
        match self.progress.batches {
            0 => Ok(()),
            batches => Err(VerifyError::Midway { batches }.into()),
        }
    }

    fn gradients_are_on_gpu(&mut self) -> Result<(), Error> {
        self.finish_dropped()?;
        match *self.progress.due.get_mut() && !self.progress.dropped {
            true if self.options.clip == Clip::BeforeReduce => Err(VerifyError::HeldBack.into()),
            true => Ok(()),
            false => Err(VerifyError::NoGradients.into()),
        }
    }

    /// Runs a verification, and adds its cost to that of its beginning.
    fn verified_by(
        &mut self,
        begun: Begun,
        verify: impl FnOnce(&mut Self) -> Result<Verified, Error>,
    ) -> Result<Verified, Error> {
        let _span = tracing::debug_span!("verify").entered();
        let (verified, sent) = self.apart_from_steps(verify)?;
        Ok(Verified { sent: begun.sent + sent, elapsed: begun.at.elapsed(), ..verified })
    }

    /// Runs `call` on every rank between two steps, and returns the bytes that this rank sends in it, which no step counts: for
    /// communication beside the optimizer. An error of this rank alone ends the run: every communicator of the optimizer is
    /// aborted, including those of [`end_with`](Self::end_with).
    pub fn apart_from_steps<T>(
        &mut self,
        call: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<(T, u64), Error> {
        let before = self.reducer.sent();
        let called = call(self);
        let sent = self.reducer.sent() - before;
        self.progress.sent_before += sent;
        Ok((self.end_if_alone(called)?, sent))
    }

    /// Registers communicators to abort together with the optimizer's, so that no rank waits there for one that has failed.
    pub fn end_with(&mut self, comms: impl IntoIterator<Item = Arc<dyn Communicator>>) {
        comms.into_iter().for_each(|comm| know(&mut self.reducer.config.comms, &comm));
    }

    fn verify_vectors(&mut self, what: What) -> Result<Verified, Error> {
        let survey = self.survey(what)?;
        let kept = if what == What::Held { self.verifying.kept.clone() } else { Vec::new() };
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

    /// Verifies in a step if that is due, once all ranks know that they take the same step.
    pub(crate) fn verify_in_step(&mut self) -> Result<(), Error> {
        if !self.verifying.is_due() {
            return Ok(());
        }
        let verified = self.verified_by(Begun::now(), |all| all.verify_vectors(What::Held))?;
        self.verifying.last = Some(verified);
        Ok(())
    }

    /// Keeps hashes after a step, if the next one verifies.
    pub(crate) fn keep_after_step(&mut self, taken: bool) -> Result<(), Error> {
        if self.verifying.every == 0 || !taken {
            return Ok(());
        }
        // A due step has verified.
        self.verifying.since = if self.verifying.is_due() { 0 } else { self.verifying.since + 1 };
        let kept = self.keep_if_due();
        self.end_if_alone(kept)
    }

    pub(crate) fn keep_if_due(&mut self) -> Result<(), Error> {
        self.verifying.kept.clear();
        if !self.verifying.is_due() {
            return Ok(());
        }
        let survey = self.survey(What::Held)?;
        for item in &survey.items {
            let hash = if item.group.is_none() { Some(self.hash(item, None)?) } else { None };
            self.verifying.kept.push(hash);
        }
        Ok(())
    }
}

/// Start of a call that all ranks make, and the bytes sent to agree on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Begun {
    at: Instant,
    sent: u64,
}

impl Begun {
    fn now() -> Self {
        Begun { at: Instant::now(), sent: 0 }
    }
}

impl Verifying {
    /// Returns true if the coming step verifies.
    fn is_due(&self) -> bool {
        self.every > 0 && self.since + 1 >= self.every
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
        if matches!(item.slot, survey::Slot::Params | survey::Slot::Grads) {
            verified.hashes.push(seen.hashes[i]);
        }
    }
    verified
}
