//! Verification of an optimizer: on request, in every nth step, and the repair of what differs.

use crate::error::Error;
use crate::optimizer::Optimizer;
use crate::reduce::together::Begun;
use crate::verify::{Comparison, Repaired, Verified, VerifyError, What, describe_counters};
use meshstep_comm::name_calls;

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
        let begun = self.reducer.call_together("verify", ready)?;
        let verified = self.comparison()?.run(begun, What::Held)?;
        self.verifier.last = Some(verified.clone());
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
        self.reducer.call_together(&format!("verify every {steps} steps"), ready)?;
        self.verifier.set_every(steps);
        self.apart_from_steps(Self::keep_if_due).map(drop)
    }

    /// Returns the report of the last verification of parameters and state, if it found no difference.
    pub fn verified(&self) -> Option<&Verified> {
        self.verifier.last.as_ref()
    }

    /// Compares reduced gradients, between the last micro-batch's `finish` and [`step`](Self::step), among the ranks that have
    /// the same at that point: ranks of [`replicas`](crate::RankRoles::replicas) with one place along each of
    /// [`extra_reductions`](crate::RankRoles::extra_reductions), the later reductions, and at stages 1 to 3 with one place among
    /// [`shards`](crate::RankRoles::shards); so at stage 0 too where ranks add up chunks of the sums over
    /// [slots](crate::Options::slots). Gradients that no other rank has are [`Verified::unchecked`]. Collective; changes
    /// nothing.
    pub fn verify_gradients(&mut self) -> Result<Verified, Error> {
        let _name = name_calls("Optimizer::verify_gradients");
        self.reducer.healthy()?;
        let ready = self.gradients_are_reduced();
        let begun = self.reducer.call_together("verify gradients", ready)?;
        self.comparison()?.run(begun, What::Grads)
    }

    /// Verifies, and overwrites every vector that disagrees with the majority of at least three ranks; returns the repairs in
    /// this rank's groups. Collective, between two steps. A difference without such a majority, or in a vector that no other rank
    /// holds, is refused ([`VerifyError::NoMajority`]), the same on every rank, and nothing has changed.
    pub fn repair(&mut self) -> Result<Vec<Repaired>, Error> {
        let _name = name_calls("Optimizer::repair");
        self.reducer.healthy()?;
        let ready = self.between_steps();
        self.reducer.call_together("repair", ready)?;
        let (repaired, _) = self.apart_from_steps(|all| all.comparison()?.repair_all())?;
        // Verify the repaired vectors.
        self.verifier.last = Some(self.comparison()?.run(Begun::now(), What::Held)?);
        Ok(repaired)
    }

    /// Flips one bit of this rank's memory, between two steps, to test that verification detects failing memory. `slot` is
    /// `param`, `master`, `grad` (once handed over) or the name of a state; `element` is the row-major index in the parameter,
    /// and lies in this rank's part of it. Not collective.
    pub fn flip_bit(&mut self, name: &str, slot: &str, element: usize, bit: u32) -> Result<(), Error> {
        self.vectors(String::new()).flip_bit(name, slot, element, bit)
    }

    fn between_steps(&mut self) -> Result<(), Error> {
        self.reducer.finish_dropped()?;
        self.check_outcomes()?;
        match self.reducer.progress.batches {
            0 => self.reducer.check_training(),
            batches => Err(VerifyError::Midway { batches }.into()),
        }
    }

    fn gradients_are_reduced(&mut self) -> Result<(), Error> {
        self.reducer.finish_dropped()?;
        let progress = &self.reducer.progress;
        match progress.is_due() && !progress.dropped {
            true if self.reducer.holds() => Err(VerifyError::HeldBack.into()),
            true => Ok(()),
            false => Err(VerifyError::NoGradients.into()),
        }
    }

    /// Returns everything besides parameters and state that must agree on all ranks, one `key = value` line per fact.
    pub(crate) fn describe_counters(&mut self) -> Result<String, Error> {
        self.decider.take_notes(&mut self.params, &self.reducer, true)?;
        let progress = &self.decider.progress;
        Ok(describe_counters(&self.params, progress.steps, progress.skips))
    }

    /// Returns a comparison of this rank's vectors and counters.
    fn comparison(&mut self) -> Result<Comparison<'_>, Error> {
        let counters = self.describe_counters()?;
        Ok(self.vectors(counters))
    }

    fn vectors(&mut self, counters: String) -> Comparison<'_> {
        let Optimizer { params, reducer, verifier, .. } = self;
        Comparison { params, reducer, verifier, counters }
    }

    /// Verifies in a step if that is due, once all ranks know that they take the same step.
    pub(super) fn verify_in_step(&mut self) -> Result<(), Error> {
        if self.verifier.is_due() {
            self.verifier.last = Some(self.comparison()?.run(Begun::now(), What::Held)?);
        }
        Ok(())
    }

    /// Keeps hashes after a step, if the next one verifies.
    pub(super) fn keep_after_step(&mut self, taken: bool) -> Result<(), Error> {
        if !taken || !self.verifier.count_step() {
            return Ok(());
        }
        let kept = self.keep_if_due();
        self.reducer.end_if_alone(kept)
    }

    /// Keeps hashes of the vectors that no other rank holds, if the next step verifies.
    pub(crate) fn keep_if_due(&mut self) -> Result<(), Error> {
        if !self.verifier.is_due() {
            self.verifier.forget();
            return Ok(());
        }
        self.vectors(String::new()).keep()
    }
}
