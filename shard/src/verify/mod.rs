//! Whether ranks that should hold the same do, bit for bit, and whether a rank still holds what it wrote.
//!
//! | what | is compared |
//! |---|---|
//! | parameters, frozen ones too | among all ranks that hold them |
//! | state and masters | among the ranks that hold the same part: all of these at stage 0, replicas of the shards at other stages |
//! | what no other rank holds | with its hash from the end of its last update, where [`Optimizer::verify_every`] has kept it |
//! | reduced gradients | among the ranks that have the same by then, by [`Optimizer::verify_gradients`] |
//! | `t`, steps, skips, hyperparameters | among all ranks; lr, scales and the step itself travel in every step's exchange, and a digest of hyperparameters |

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
use crate::{Among, Clip, Error, Optimizer};
use compare::Seen;
use meshstep_comm::Communicator;
use std::sync::Arc;
use std::time::{Duration, Instant};
use survey::{Survey, What};

/// What a verification came to that found nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verified {
    /// Vectors that were compared with other ranks'; a parameter is one, and each part of its state.
    pub compared: usize,
    /// Vectors that only this rank holds, and that are what it wrote.
    pub kept: usize,
    /// Vectors that only this rank holds, and of which it has no hash.
    pub unchecked: usize,
    /// Bytes of memory read on this rank.
    pub bytes: u64,
    /// Bytes this rank has sent.
    pub sent: u64,
    /// How long it took here.
    pub elapsed: Duration,
    /// The hash of each parameter's bits, at stage 3 of this rank's part of them, in registration order; of gradients' after
    /// [`Optimizer::verify_gradients`].
    pub hashes: Vec<u64>,
}

/// What verifying keeps from call to call.
#[derive(Debug, Default)]
pub(crate) struct Verifying {
    /// After how many steps; 0: only when asked.
    every: u64,
    /// Steps taken since the last one that verified.
    since: u64,
    /// Hashes of what no other rank holds, by place in the survey, from the end of its last update.
    kept: Vec<Option<u64>>,
    replicas: Vec<Replicas>,
    /// For each vector of frozen parameters, the ranks that hold it.
    pub(crate) frozen: Vec<Arc<Among>>,
    pub(crate) last: Option<Verified>,
}

impl Optimizer {
    /// Compares parameters and state between two steps, and changes nothing. Collective. A difference is [`Error::Differs`], the
    /// same on every rank; training may go on after it.
    ///
    /// It reads everything once, and two words of each vector become one over the n ranks that hold the same: a ring sends 16 ·
    /// 2(n-1)/n bytes for them. What only this rank holds is compared where a hash of it was kept;
    /// [`Verified`] says of how much that is so. On a GPU values are copied to the host, 2^20 elements at a time, and hashed there.
    pub fn verify(&mut self) -> Result<Verified, Error> {
        self.handover.healthy()?;
        let ready = self.between_steps();
        let begun = self.call_together("verify", ready)?;
        let verified = self.verified_by(begun, |all| all.verify_vectors(What::Held))?;
        self.verifying.last = Some(verified.clone());
        Ok(verified)
    }

    /// From now on every `steps`th [`step`](Self::step) verifies once its gradients have arrived, before it changes anything; 0:
    /// none does. Collective, and checked. A difference is the step's error, which drops its gradients; the next one verifies
    /// again.
    ///
    /// Hashes of what only this rank holds (state that is sharded, parts of parameters without replicas) are kept from the end
    /// of the update before a verification, which reads that once more: with `steps` 1 after every update, so that it is watched all
    /// the time; otherwise between that update and the verification. On a GPU the host waits for such steps.
    pub fn verify_every(&mut self, steps: u64) -> Result<(), Error> {
        self.handover.healthy()?;
        let ready = self.between_steps();
        self.call_together(&format!("verify every {steps} steps"), ready)?;
        (self.verifying.every, self.verifying.since) = (steps, 0);
        self.apart_from_steps(Self::keep_if_due).map(drop)
    }

    /// What the last verification of parameters and state came to, if it found nothing.
    pub fn verified(&self) -> Option<&Verified> {
        self.verifying.last.as_ref()
    }

    /// Compares reduced gradients, between the last micro-batch's `finish` and [`step`](Self::step), among the ranks that have
    /// them alike by then: those of [`Among::copies`] with one place along each of [`Among::further`], over which they are reduced
    /// later, and at stages 1 to 3 with one place among [`Among::shards`]. What no other rank has is [`Verified::unchecked`].
    /// Collective; changes nothing.
    pub fn verify_gradients(&mut self) -> Result<Verified, Error> {
        self.handover.healthy()?;
        let ready = self.gradients_are_there();
        let begun = self.call_together("verify gradients", ready)?;
        self.verified_by(begun, |all| {
            all.handover.settle()?;
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

    fn gradients_are_there(&mut self) -> Result<(), Error> {
        self.finish_dropped()?;
        match *self.progress.due.get_mut() && !self.progress.dropped {
            true if self.options.clip == Clip::BeforeReduce => Err(VerifyError::HeldBack.into()),
            true => Ok(()),
            false => Err(VerifyError::NoGradients.into()),
        }
    }

    /// A verification, and what it took with its beginning.
    fn verified_by(
        &mut self,
        begun: Begun,
        verify: impl FnOnce(&mut Self) -> Result<Verified, Error>,
    ) -> Result<Verified, Error> {
        let _span = tracing::debug_span!("verify").entered();
        let (verified, sent) = self.apart_from_steps(verify)?;
        Ok(Verified { sent: begun.sent + sent, elapsed: begun.at.elapsed(), ..verified })
    }

    /// What every rank does in `call`, between two steps, and the bytes this one sends there, which are no step's: for what ranks
    /// tell each other beside the optimizer. An error that only this rank has ends it for all: every communicator of the
    /// optimizer is aborted, those of [`end_with`](Self::end_with) too.
    pub fn apart_from_steps<T>(
        &mut self,
        call: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<(T, u64), Error> {
        let before = self.handover.sent();
        let called = call(self);
        let sent = self.handover.sent() - before;
        self.progress.sent_before += sent;
        Ok((self.end_if_alone(called)?, sent))
    }

    /// From now on these are aborted when the optimizer's communicators are, so that nobody waits there for a rank that has failed.
    pub fn end_with(&mut self, comms: impl IntoIterator<Item = Arc<dyn Communicator>>) {
        comms.into_iter().for_each(|comm| know(&mut self.handover.fixed.comms, &comm));
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

    /// In a step, once all ranks know that they take the same one: verifies if that is due.
    pub(crate) fn verify_in_step(&mut self) -> Result<(), Error> {
        if !self.verifying.is_due() {
            return Ok(());
        }
        let verified = self.verified_by(Begun::now(), |all| all.verify_vectors(What::Held))?;
        self.verifying.last = Some(verified);
        Ok(())
    }

    /// After a step: keeps hashes, if the next one verifies.
    pub(crate) fn keep_after_step(&mut self, taken: bool) -> Result<(), Error> {
        if self.verifying.every == 0 || !taken {
            return Ok(());
        }
        // A due one has verified.
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

/// When a call of every rank began, and what it took to agree on it.
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
    /// Whether the coming step verifies.
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
