//! Micro-batches of a step: their beginning, the completion of dropped ones, and the end of the step.

use crate::config::options::{Clip, Combine, StepArgs};
use crate::error::{Error, SlotError, WeightError};
use crate::reduce::local_clip::LocalClip;
use crate::reduce::reducer::GradReducer;
use meshstep_optim::{NormSum, clip_coef, scale};
use std::ops::Range;

/// Weights up to this are exact in f32, in which gradients are multiplied by them.
const MAX_WEIGHT: u64 = 1 << 24;

impl GradReducer {
    /// Begins a micro-batch, and returns the factor on its gradients. `last`: no other follows in this step.
    pub(crate) fn begin_micro_batch(&mut self, weight: u64, last: bool) -> Result<f64, Error> {
        self.healthy()?;
        self.check_training()?;
        self.check_weight(weight)?;
        self.finish_dropped()?;
        if self.progress.is_due() {
            return Err(Error::StepDue);
        }
        self.check_slot(last)?;
        self.progress.begin(weight);
        self.begin(last, self.holds());
        Ok(if self.config.options.combine == Combine::Weighted { weight as f64 } else { 1.0 })
    }

    /// Ends a micro-batch. Gradients that are missing now are recorded.
    pub(crate) fn finish_micro_batch(&self) -> Result<(), Error> {
        let completed = self.complete(|param| self.progress.miss(param, self.config.options.missing));
        self.progress.end(completed?);
        Ok(())
    }

    /// Returns true if gradients stay on this rank until the step.
    pub(crate) fn holds(&self) -> bool {
        self.config.options.clip == Clip::BeforeReduce || self.config.options.reduce_in_step
    }

    /// Returns this rank's slots, if the step has slots.
    fn run(&self) -> Option<Range<usize>> {
        let rank = self.config.buckets.first()?.among.shards.rank();
        Some(self.config.slots.as_ref()?.runs().run(rank))
    }

    /// Returns the slot of the micro-batch under way, if the step has slots.
    pub(crate) fn slot(&self) -> Option<usize> {
        Some(self.run()?.start + self.progress.batches.saturating_sub(1) as usize)
    }

    /// Refuses a micro-batch that is not the next slot of this rank's run.
    fn check_slot(&self, last: bool) -> Result<(), Error> {
        let Some(run) = self.run() else { return Ok(()) };
        let made = self.progress.batches;
        match last == (made + 1 == run.len() as u64) {
            true => Ok(()),
            false => Err(SlotError::Order { run, made, last }.into()),
        }
    }

    /// Returns true if a gradient of this micro-batch may be written into its place: with slots in the first one of a run, as without.
    pub(crate) fn writes_in_place(&self) -> bool {
        self.config.slots.is_none() || self.progress.batches <= 1
    }

    /// Returns the number of micro-batches that a mean is over: those of this rank, whose reduction divides by the ranks, or all slots.
    pub(crate) fn batches(&self) -> u64 {
        self.config.slots.as_ref().map_or(self.progress.batches, |slots| slots.runs().total() as u64)
    }

    /// Refuses weights by which gradients cannot be multiplied exactly.
    pub(crate) fn check_weight(&self, weight: u64) -> Result<(), Error> {
        if self.config.options.combine == Combine::Weighted && weight > MAX_WEIGHT {
            return Err(WeightError::TooLarge { weight, max: MAX_WEIGHT }.into());
        }
        Ok(())
    }

    /// Checks that no micro-batch is under way, no step is due, and the model is not being evaluated.
    pub(crate) fn check_idle(&self) -> Result<(), Error> {
        self.check_no_step()?;
        self.check_training()
    }

    /// Checks that no micro-batch is under way and no step is due.
    pub(crate) fn check_no_step(&self) -> Result<(), Error> {
        if self.progress.batches == 0 { Ok(()) } else { Err(Error::StepDue) }
    }

    /// Checks that parameters are where they are trained.
    pub(crate) fn check_training(&self) -> Result<(), Error> {
        if self.progress.evaluating { Err(Error::Evaluating) } else { Ok(()) }
    }

    /// Completes a dropped micro-batch with zeros, so that this rank sends as many buckets as the others; the step will be an
    /// error on every rank.
    pub(crate) fn finish_dropped(&mut self) -> Result<(), Error> {
        if self.progress.take_dropped() && self.complete_unfilled()? {
            self.progress.set_due();
        }
        Ok(())
    }

    /// Sends the buckets that the other ranks wait for, as they are, on a rank that will not fill them.
    pub(crate) fn send_unfilled(&mut self) -> Result<(), Error> {
        self.finish_dropped()?;
        if !self.progress.is_due() {
            self.begin(true, self.holds());
            self.complete_unfilled()?;
        }
        Ok(())
    }

    /// Sends the buckets that the other ranks wait for; an error aborts the run, because nothing retries.
    fn complete_unfilled(&self) -> Result<bool, Error> {
        self.complete(|_| {}).map_err(|error| self.abort_with(error))
    }

    /// Scales the gradients collected on this rank down to `at`'s norm; `unscale` divides them by the loss scale. Non-finite
    /// gradients stay as they are: the exchange finds them.
    pub(crate) fn clip_held(&mut self, at: &StepArgs, unscale: f64) -> Result<(), Error> {
        let clips = at.max_norm.filter(|_| self.config.options.clip == Clip::BeforeReduce);
        let Some(max_norm) = clips else { return Ok(()) };
        let options = self.config.options.clone();
        let queue = &options.queue;
        let mut sum = NormSum::new(options.norm, queue, &options.meter)?;
        self.held().try_for_each(|grads| sum.add(grads.as_slice(), queue))?;
        let sum = sum.read(queue)?;
        let norm = unscale * self.progress.own_share(options.combine) * sum.finish();
        let coef = if sum.non_finite() > 0 { 1.0 } else { clip_coef(norm, max_norm)? };
        if coef < 1.0 {
            self.held().try_for_each(|grads| scale(grads.as_mut(), coef, queue))?;
        }
        self.progress.local_clip = Some(LocalClip { norm, coef });
        Ok(())
    }

    /// Returns the bytes sent since the last step.
    pub(crate) fn sent_in_step(&self) -> u64 {
        self.sent() - self.progress.sent_before
    }

    /// Drops the gradients of the step, whatever its outcome.
    pub(crate) fn forget(&mut self) -> Result<(), Error> {
        self.next_step().map_err(|error| self.abort_with(error))?;
        self.progress.forget(self.sent());
        Ok(())
    }
}
