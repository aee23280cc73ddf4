//! The step: gradients in, one exchange that decides, one pass that updates, parameters out.

#[cfg(feature = "cuda")]
use super::gpu_step;
use crate::config::options::StepArgs;
use crate::error::Error;
use crate::gather::unit_gather::UnitSource;
use crate::optimizer::Optimizer;
use crate::optimizer::micro_batch::MicroBatch;
use crate::optimizer::update_and_gather::{is_long, reduce_update_and_gather, update_and_gather};
use crate::reduce::local_clip::LocalClip;
use crate::step::decider::StepDecision;
use crate::step::outcome::{Outcome, Pending, Traffic};
use crate::update::hooks::UpdateHooks;
use meshstep_comm::name_calls;
use meshstep_optim::{LossScaleState, Scalars};

impl Optimizer {
    /// Begins the step's last micro-batch, usually its only one: its buckets are sent as they fill. `weight` is its number of
    /// samples or tokens. [`Combine::Weighted`](crate::Combine::Weighted) multiplies by it: there it is at most 2^24, and a
    /// micro-batch of weight 0 counts as zeros whatever its gradients are, because the mean over no tokens is NaN. Other
    /// combinations do not use it.
    pub fn micro_batch(&mut self, weight: u64) -> Result<MicroBatch<'_>, Error> {
        self.begin(weight, true)
    }

    /// Begins a micro-batch that is not the step's last. Its gradients are added up locally before they are sent. At stages 2 and
    /// 3, however, unless they [accumulate locally](crate::Accumulate), every micro-batch is reduced and only this rank's chunk is kept: k micro-batches send (k+1)/2 times the bytes,
    /// and sums are rounded after each reduction instead of before the only one, so that the bits may differ from other stages'.
    /// At these stages every rank makes the same number of micro-batches.
    pub fn accumulate(&mut self, weight: u64) -> Result<MicroBatch<'_>, Error> {
        self.begin(weight, false)
    }

    fn begin(&mut self, weight: u64, last: bool) -> Result<MicroBatch<'_>, Error> {
        let _name = name_calls("Optimizer::micro_batch");
        self.params.check_some()?;
        let weight = self.reducer.begin_micro_batch(weight, last)?;
        Ok(MicroBatch { from: self.units_from(), decider: &self.decider, weight })
    }

    /// Returns the parts that gathers of units need.
    pub(crate) fn units_from(&self) -> UnitSource<'_> {
        UnitSource { params: &self.params, reducer: &self.reducer, gatherer: &self.gatherer }
    }

    /// Takes the step. Collective. Errors that all ranks share ([`Error::Fault`], [`Error::Disagree`], [`Error::Weights`],
    /// [`Error::TooManySkips`], [`Error::Differs`]) drop the gradients and change nothing else, except that `TooManySkips` counts
    /// its skip as one more in a row.
    ///
    /// On a GPU the host does not wait, unless [`Clip::BeforeReduce`](crate::Clip::BeforeReduce) limits a norm;
    /// [`Pending::outcome`] then returns such errors. If its `Pending` was dropped unread, a later call returns the error: a step
    /// does so after it has sent everything that the other ranks wait for, but not the same step on every rank. A caller that
    /// ends the run on an error reads every outcome, possibly a few steps later.
    pub fn step(&mut self, at: StepArgs) -> Result<Pending, Error> {
        self.step_with_hooks(at, &mut ())
    }

    /// Takes the step, with hooks around its update.
    pub(crate) fn step_with_hooks(
        &mut self,
        at: StepArgs,
        hooks: &mut dyn UpdateHooks,
    ) -> Result<Pending, Error> {
        let _name = name_calls("Optimizer::step");
        let _span = tracing::debug_span!("step", step = self.decider.progress.steps).entered();
        self.params.check_some()?;
        self.reducer.healthy()?;
        self.reducer.check_training()?;
        #[cfg(feature = "cuda")]
        if self.params.options.queue.stream().is_some() {
            return gpu_step::take(self, &at, hooks).map(Pending::from);
        }
        let stepped = self.decide(&at).and_then(|decision| match decision {
            StepDecision::Apply { norm, factor, coef, complete } => {
                self.apply(&at, ([norm, factor, coef], complete), hooks)
            }
            StepDecision::Skip { non_finite } => self.skip(non_finite, hooks),
        });
        self.end_failed(&stepped)?;
        // After an error buckets may still be in flight.
        self.reducer.settle()?;
        self.decider.progress.steps += u64::from(stepped.is_ok());
        self.reducer.forget()?;
        self.keep_after_step(stepped.is_ok())?;
        stepped.map(Pending::from)
    }

    /// Decides the step as all ranks do, and verifies if that is due.
    fn decide(&mut self, at: &StepArgs) -> Result<StepDecision, Error> {
        let arrived = self.decider.arrive(&self.params, &mut self.reducer, at);
        let arrived = arrived.and_then(|fault| Ok((fault, self.reducer.norm()?)));
        let (fault, norm) = arrived.map_err(|error| self.reducer.abort_with(error))?;
        let operations = self.gatherer.operations(&mut self.reducer);
        let parts = (&self.params, &mut self.reducer);
        let decision = self.decider.decide(parts, at, (fault, operations), &norm)?;
        let decision = self.decider.clip_late(&mut self.reducer, decision, at);
        let decision = decision.map_err(|error| self.reducer.abort_with(error))?;
        self.verify_in_step()?;
        Ok(decision)
    }

    /// Updates this rank's shard bucket by bucket as they arrive, and sends each while the next is updated.
    fn apply(
        &mut self,
        at: &StepArgs,
        ([norm, factor, coef], complete): ([f64; 3], bool),
        hooks: &mut dyn UpdateHooks,
    ) -> Result<Outcome, Error> {
        let scalars =
            Scalars { lr: at.lr, grad_scale: factor * coef, zero_grads: false, ..Scalars::default() };
        let (counts, exchange) = (self.params.options.missing.counts(), &self.decider.exchange);
        self.updater.select(&self.params, |param| !counts || exchange.present_on(param) > 0);
        let updated = hooks.before(&mut self.params).and_then(|()| self.update(&scalars, hooks));
        let later = updated.and_then(|()| match complete {
            true => Ok(None),
            false => self.decider.norm_afterwards(&mut self.reducer, factor),
        });
        // A rule refused checked arguments: a bug. Abort, so that the other ranks do not wait.
        let later = later.map_err(|error| self.reducer.abort_with(error));
        let landed = self.gatherer.land(&mut self.params);
        let norm = later.and_then(|later| landed.map(|()| later.unwrap_or(norm)))?;
        self.decider.count_applied(&self.params.options);
        let (preempted, traffic) = (self.decider.preempted, self.traffic());
        Ok(Outcome::Applied { norm, coef, preempted, traffic })
    }

    /// Updates every parameter that is due, and runs the hooks before parameters are sent.
    fn update(&mut self, scalars: &Scalars, hooks: &mut dyn UpdateHooks) -> Result<(), Error> {
        let Optimizer { params, reducer, updater, gatherer, .. } = self;
        let holds = hooks.holds();
        updater.measure(params, reducer, scalars)?;
        let in_flight = reducer.in_flight();
        for b in 0..params.buckets.len() {
            match reducer.take_unreduced(b) {
                Some(grads) if holds => reducer.send_late(b, grads)?,
                Some(grads) => {
                    reduce_update_and_gather(b, grads, (params, reducer), updater, scalars)?;
                    continue;
                }
                None => {}
            }
            // An operation that this thread waits for comes after the buckets that are still in flight.
            if !holds && b + 1 >= in_flight && is_long(b, params, reducer) {
                update_and_gather(b, (params, reducer), updater, scalars)?;
                continue;
            }
            updater.update(b, params, reducer, scalars)?;
            if !holds && updater.exchanged().binary_search(&b).is_err() {
                gatherer.send(b, params, reducer)?;
            }
        }
        updater.exchange(params, reducer, scalars)?;
        if !holds {
            updater.exchanged().iter().try_for_each(|&b| gatherer.send(b, params, reducer))?;
        }
        updater.count(params);
        hooks.after(params, true)?;
        if holds { gatherer.send_all(params, reducer) } else { Ok(()) }
    }

    fn skip(&mut self, non_finite: u64, hooks: &mut dyn UpdateHooks) -> Result<Outcome, Error> {
        self.pass_by(hooks)?;
        let in_a_row = self.decider.count_skipped(&self.params.options)?;
        let (preempted, traffic) = (self.decider.preempted, self.traffic());
        Ok(Outcome::Skipped { non_finite, in_a_row, preempted, traffic })
    }

    /// Runs the hooks of a step that is skipped.
    pub(super) fn pass_by(&mut self, hooks: &mut dyn UpdateHooks) -> Result<(), Error> {
        let passed = hooks.before(&mut self.params).and_then(|()| hooks.after(&mut self.params, false));
        passed.map_err(|error| self.reducer.abort_with(error))?;
        if hooks.changed() { self.gatherer.gather_all(&mut self.params, &self.reducer) } else { Ok(()) }
    }

    /// Poisons the optimizer after a failure of communication, and returns the error with which the run has ended.
    pub(super) fn end_failed<T>(&self, stepped: &Result<T, Error>) -> Result<(), Error> {
        if let Err(Error::Comm(failure)) = stepped {
            self.reducer.poison(failure.clone());
        }
        let poisoned = self.reducer.healthy();
        poisoned.map_err(|poisoned| stepped.as_ref().err().cloned().unwrap_or(poisoned))
    }

    /// Returns the bytes of the step so far.
    pub(super) fn traffic(&mut self) -> Traffic {
        Traffic {
            sent: self.reducer.sent_in_step(),
            copied: self.reducer.progress.copied(),
            peak: self.params.options.meter.peak_total(),
            pool_grown: self.reducer.grown(),
        }
    }

    /// Drops the gradients handed over since the last step. Collective: buckets that were sent are reduced nevertheless, so every rank
    /// drops them after the same micro-batches. With [slots](crate::Options::slots) all ranks have finished their runs by then, or none has.
    pub fn discard_gradients(&mut self) -> Result<(), Error> {
        let _name = name_calls("Optimizer::discard_gradients");
        self.reducer.healthy()?;
        self.reducer.finish_dropped()?;
        self.reducer.note_discarded();
        self.reducer.settle()?;
        self.reducer.forget()
    }

    /// Returns what [`Clip::BeforeReduce`](crate::Clip::BeforeReduce) did on this rank in the last step, if a bound was given.
    pub fn local_clip(&self) -> Option<LocalClip> {
        self.reducer.progress.local_clip
    }

    /// Returns the factor by which the caller multiplies the losses of all micro-batches of the coming step; 1 without
    /// [`Options::loss_scale`](crate::Options::loss_scale). It changes in [`step`](Self::step) only, after the gradients were
    /// divided by it, and not if the step is an error. On a GPU this waits for the steps launched so far, which decide a dynamic
    /// scale; a kernel that reads `loss_scale_address` (feature `cuda`) does not wait.
    pub fn loss_scale(&self) -> f64 {
        self.decider.loss_factor(&self.params.options)
    }

    /// Returns the loss scale's state, for a checkpoint; the same on every rank. On a GPU it waits as
    /// [`loss_scale`](Self::loss_scale) does.
    pub fn loss_scale_state(&self) -> Option<LossScaleState> {
        self.decider.loss_scale(&self.params.options)
    }

    /// Restores a saved state, between two steps. All ranks restore the same state, which the next step compares.
    pub fn restore_loss_scale(&mut self, state: LossScaleState) -> Result<(), Error> {
        self.reducer.check_idle()?;
        let rule = self.params.options.loss_scale.ok_or(Error::NoLossScale)?;
        rule.check_state(&state)?;
        self.decider.take_notes(&mut self.params, &self.reducer, true)?;
        self.decider.progress.loss_scale = Some(state);
        self.decider.publish(&self.params)
    }

    /// Returns the device address of the coming step's loss scale, an f64: kernels on the options' queue multiply the loss by it
    /// while the host does not wait. `None` on the CPU.
    #[cfg(feature = "cuda")]
    pub fn loss_scale_address(&mut self) -> Result<Option<u64>, Error> {
        gpu_step::loss_scale_address(self)
    }

    /// Returns the steps taken or skipped so far, for [`Options::schedule`](crate::Options::schedule) and for checkpoints. On a
    /// GPU this includes launched steps that are not decided yet.
    pub fn steps(&self) -> u64 {
        self.decider.steps()
    }

    /// Restores a saved count of steps, between two steps. All ranks restore the same count, which the next step compares.
    pub fn restore_steps(&mut self, steps: u64) -> Result<(), Error> {
        self.reducer.check_idle()?;
        self.decider.take_notes(&mut self.params, &self.reducer, true)?;
        self.decider.progress.steps = steps;
        self.decider.publish(&self.params)
    }

    /// Returns arguments for the next step: the rate that [`Options::schedule`](crate::Options::schedule) has for it, and no
    /// clipping.
    ///
    /// On a GPU a failed step counts until its outcome is known: after an error, read the outcome before calling this.
    ///
    /// ```
    /// # use meshstep_optim::{AdamW, schedule::{Cosine, Schedule}};
    /// # use meshstep_shard::{StepArgs, Error, Optimizer, Options};
    /// # use meshstep_tensor::{DType, Layout};
    /// # meshstep_comm::loopback::spawn(2, |comm| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// # let layout = Layout::builder().param("w", &[3], DType::F32).build()?;
    /// let schedule = Schedule::new(3e-4, Cosine::new(100, 10_000))?;
    /// let options = Options { schedule: Some(schedule), ..Options::default() };
    /// let mut opt = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), options)?;
    /// # let mb = opt.micro_batch(1)?;
    /// # mb.grad("w", &[1f32; 3][..])?;
    /// # mb.finish()?;
    /// let at = StepArgs { max_norm: Some(1.0), ..opt.scheduled()? };
    /// opt.step(at)?.outcome()?;
    /// assert_eq!(opt.scheduled()?.lr, 3e-4 * 0.01);
    /// # Ok(())
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    pub fn scheduled(&mut self) -> Result<StepArgs, Error> {
        self.decider.take_notes(&mut self.params, &self.reducer, false)?;
        let lr = self.decider.scheduled_lr(&self.params.options).ok_or(Error::NoSchedule)?;
        Ok(StepArgs { lr, max_norm: None, grad_scale: 1.0 })
    }
}
