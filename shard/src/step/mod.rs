//! The step: once the gradients are in, one exchange decides, one pass updates and the parameters are gathered.

pub(crate) mod exchange;
#[cfg(feature = "cuda")]
pub(crate) mod gpu;
#[cfg(feature = "cuda")]
pub(crate) mod gpu_hooks;
pub(crate) mod hooks;

use crate::config::options::StepArgs;
use crate::config::param_groups::of_groups;
use crate::optimizer::layout_state::ParamEntry;
use crate::step::exchange::{Brought, FIELDS, FaultCode, Known};
#[cfg(feature = "cuda")]
use crate::step::gpu::Ticket;
use crate::step::hooks::UpdateHooks;
use crate::{Clip, Combine, Error, NonFinite, Optimizer, WeightError};
use meshstep_comm::name_calls;
use meshstep_optim::{NormAccumulator, clip_coef};
use meshstep_tensor::Place;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// Gradient factors that stay within f32 with any number of ranks.
const GRAD_SCALES: std::ops::RangeInclusive<f64> = 1e-30..=1e30;

/// A step taken on this rank. On the CPU its outcome is already known; a GPU decides the step when its queue reaches it.
#[derive(Debug)]
#[must_use = "the outcome says whether the step was applied or skipped"]
pub struct Pending(PendingState);

#[derive(Debug)]
enum PendingState {
    Ready(Outcome),
    #[cfg(feature = "cuda")]
    Deferred(Arc<Ticket>),
}

impl Pending {
    /// Returns what the step did, the same on every rank except for the traffic. On a GPU it waits for the step, and returns the
    /// errors that all ranks share.
    pub fn outcome(self) -> Result<Outcome, Error> {
        match self.0 {
            PendingState::Ready(outcome) => Ok(outcome),
            #[cfg(feature = "cuda")]
            PendingState::Deferred(ticket) => ticket.outcome(),
        }
    }
}

/// Outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// The step updated parameters and state.
    Applied {
        /// Norm of the whole combined gradient before clipping; infinite if some elements were not finite and
        /// [`NonFinite::Propagate`] took the step nevertheless.
        norm: f64,
        /// Factor that clipped the combined gradient; 1 if its norm was within the bound, or if each rank clips its own.
        coef: f64,
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
        /// Bytes moved and held.
        traffic: Traffic,
    },
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

impl Optimizer {
    /// Takes the step. Collective. Errors that all ranks share ([`Error::Fault`], [`Error::Disagree`], [`Error::Weights`],
    /// [`Error::TooManySkips`], [`Error::Differs`]) drop the gradients and change nothing else, except that `TooManySkips` counts
    /// its skip as one more in a row.
    ///
    /// On a GPU the host does not wait, unless [`Clip::BeforeReduce`] limits a norm; [`Pending::outcome`] then returns such
    /// errors. If its `Pending` was dropped unread, a later call returns the error: a step does so after it has sent everything
    /// that the other ranks wait for, but not the same step on every rank. A caller that ends the run on an error reads every
    /// outcome, possibly a few steps later.
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
        let _span = tracing::debug_span!("step", step = self.progress.steps).entered();
        self.check_some()?;
        self.reducer.healthy()?;
        #[cfg(feature = "cuda")]
        if self.options.queue.stream().is_some() {
            let ticket = match hooks.waits() {
                true => self.step_on_gpu_with_hooks(&at, hooks)?,
                false => self.step_on_gpu(&at)?,
            };
            return Ok(Pending(PendingState::Deferred(ticket)));
        }
        let arrived = self.arrive(&at).and_then(|fault| Ok((fault, self.reducer.norm()?)));
        let arrived = arrived.map_err(|error| self.reducer.abort_with(error));
        let decided = arrived.and_then(|(fault, norm)| self.decide(&at, fault, &norm));
        let decided = decided.and_then(|decision| self.verify_in_step().map(|()| decision));
        let outcome = match decided {
            Ok(StepDecision::Apply { norm, factor, coef }) => {
                self.apply(&at, [factor, coef], hooks).map(|later| {
                    (self.progress.skips, self.progress.skips_at_min_scale) = (0, 0);
                    self.rescale(false);
                    let norm = later.unwrap_or(norm);
                    Outcome::Applied { norm, coef, traffic: self.traffic() }
                })
            }
            Ok(StepDecision::Skip { non_finite }) => self.pass_by(hooks).and_then(|()| self.skip(non_finite)),
            Err(error) => Err(error),
        };
        if let Err(Error::Comm(failure)) = &outcome {
            self.reducer.poison(failure.clone());
        }
        if let Err(poisoned) = self.reducer.healthy() {
            return Err(outcome.err().unwrap_or(poisoned));
        }
        // After an error buckets may still be in flight.
        self.reducer.settle()?;
        self.progress.steps += u64::from(outcome.is_ok());
        self.forget()?;
        self.keep_after_step(outcome.is_ok())?;
        outcome.map(|outcome| Pending(PendingState::Ready(outcome)))
    }

    /// Drops the gradients handed over since the last step. Collective: their buckets are reduced nevertheless, so every rank
    /// drops them after the same micro-batches.
    pub fn discard_gradients(&mut self) -> Result<(), Error> {
        let _name = name_calls("Optimizer::discard_gradients");
        self.reducer.healthy()?;
        self.finish_dropped()?;
        self.reducer.settle()?;
        self.forget()
    }

    /// Sends everything that the exchange needs, even if gradients are missing, and returns this rank's fault.
    pub(crate) fn arrive(&mut self, at: &StepArgs) -> Result<Option<FaultCode>, Error> {
        self.finish_dropped()?;
        let due = *self.progress.due.get_mut();
        let missing = *self.progress.missing.get_mut();
        let held = self.options.clip == Clip::BeforeReduce;
        self.progress.local_clip = None;
        if held && self.argument_fault(at).is_none() {
            self.clip_held(at)?;
        }
        if !due || held {
            // The other ranks' reductions wait for this rank's buckets.
            self.reducer.begin(true, false);
            self.reducer.complete(|_| {})?;
        }
        if !self.goes_ahead(at) {
            self.reducer.settle()?;
            self.reducer.second_reduce()?;
        }
        Ok(match () {
            () if self.progress.dropped => Some(FaultCode::Unfinished),
            () if !due => Some(FaultCode::NoMicroBatch),
            () if missing != usize::MAX => Some(FaultCode::Missing(missing)),
            () => self.argument_fault(at),
        })
    }

    /// Returns true if gradients do not influence the decision and no bucket is reduced a second time, so that one bucket can be
    /// updated while others are still in flight.
    fn goes_ahead(&self, at: &StepArgs) -> bool {
        let extra_reductions =
            self.reducer.config.buckets.iter().any(|bucket| !bucket.among.extra_reductions.is_empty());
        self.options.non_finite == NonFinite::Propagate && self.limit(at).is_none() && !extra_reductions
    }

    /// Returns the bound on the norm of the combined gradient.
    fn limit(&self, at: &StepArgs) -> Option<f64> {
        at.max_norm.filter(|_| self.options.clip == Clip::AfterReduce)
    }

    fn argument_fault(&self, at: &StepArgs) -> Option<FaultCode> {
        // After a larger step the squares of parameters are not finite in f32.
        let fits = |lr: f64| lr >= 0.0 && ((lr * lr) as f32).is_finite();
        match () {
            () if !fits(at.lr) => Some(FaultCode::Lr),
            () if !self.entries.iter().all(|e| fits(self.groups[e.group].reach(at.lr, matrix(e)))) => {
                Some(FaultCode::Lr)
            }
            () if self.scheduled_lr().is_some_and(|lr| lr.to_bits() != at.lr.to_bits()) => {
                Some(FaultCode::Schedule)
            }
            () if !at.max_norm.is_none_or(|x| x.is_finite() && x > 0.0) => Some(FaultCode::MaxNorm),
            // On a GPU the device holds the scale and makes this check.
            () if self.options.queue.place() == Place::Cpu && !GRAD_SCALES.contains(&self.unscale(at)) => {
                Some(FaultCode::GradScale)
            }
            () => None,
        }
    }

    /// Runs the exchange and derives the decision, the same on every rank. While buckets are still in flight the norm is
    /// incomplete, and does not influence the decision.
    fn decide(
        &mut self,
        at: &StepArgs,
        fault: Option<FaultCode>,
        norm: &NormAccumulator,
    ) -> Result<StepDecision, Error> {
        let comm = Arc::clone(self.reducer.config.words());
        let fields = self.fields(at);
        if self.options.missing.counts() {
            self.exchange.present(comm.rank(), self.progress.present.iter().map(|p| p.load(SeqCst)));
        }
        if self.options.defers() {
            self.exchange.lacked(self.reducer.lacked().iter().copied());
        }
        let fault = fault.map_or(0, |f| exchange::encode_fault(&f, comm.rank()));
        let (weight, balance) = (self.weight(), self.balance());
        let known = self.exchange.run(&*comm, Brought { weight, balance, norm, fault, fields });
        // If a bucket in flight has failed, its error is the cause.
        let known = known.map_err(|error| self.reducer.settle().err().unwrap_or(error))?;
        if self.options.defers() {
            let (exchange, buckets) = (&self.exchange, self.buckets.len());
            self.reducer.defer(|b| exchange.lacked_somewhere(b, buckets));
        }
        if known.fault != 0 {
            let name = |p: usize| self.entries.get(p).map_or(String::new(), |e| e.param.name().to_owned());
            let (rank, fault) = exchange::decode_fault(known.fault, name);
            return Err(Error::Fault { rank, fault });
        }
        if !known.same {
            return Err(exchange::disagreement(&*comm, &self.options, &fields, &self.groups)?);
        }
        self.check_presence(&*comm)?;
        self.check_weights(&*comm, known.balanced)?;
        self.judge(at, &known)
    }

    /// Returns the weight of this rank's micro-batches, or 0 if another rank counts them.
    pub(crate) fn weight(&self) -> u64 {
        if self.reducer.config.place.first { self.progress.weight } else { 0 }
    }

    fn judge(&self, at: &StepArgs, known: &Known) -> Result<StepDecision, Error> {
        let combined = match self.options.combine {
            Combine::Mean => 1.0 / self.progress.batches as f64,
            Combine::Sum => 1.0,
            Combine::Weighted if known.weight == 0 => return Err(WeightError::AllZero.into()),
            Combine::Weighted => 1.0 / known.weight as f64,
        };
        let non_finite = known.norm.non_finite();
        if non_finite > 0 && self.options.non_finite == NonFinite::Skip {
            return Ok(StepDecision::Skip { non_finite });
        }
        let factor = self.unscale(at) * combined;
        let norm = reported(factor, &known.norm);
        let coef = self.limit(at).map_or(Ok(1.0), |max_norm| clip_coef(norm, max_norm))?;
        Ok(StepDecision::Apply { norm, factor, coef })
    }

    /// Counts one more skip in a row. Returns the number of skips, or an error if there are too many.
    pub(crate) fn count_skip(&mut self) -> Result<u32, Error> {
        self.progress.skips += 1;
        self.progress.skips_at_min_scale =
            if self.scale_can_fall() { 0 } else { self.progress.skips_at_min_scale + 1 };
        let skips = self.progress.skips;
        if self.progress.skips_at_min_scale > self.options.max_skips {
            Err(Error::TooManySkips { skips })
        } else {
            Ok(skips)
        }
    }

    fn skip(&mut self, non_finite: u64) -> Result<Outcome, Error> {
        let in_a_row = self.count_skip()?;
        self.rescale(true);
        Ok(Outcome::Skipped { non_finite, in_a_row, traffic: self.traffic() })
    }

    /// Returns the values that must be the same on every rank, in the order of [`FIELDS`].
    fn fields(&mut self, at: &StepArgs) -> [u64; FIELDS.len()] {
        let max_norm = at.max_norm.unwrap_or(f64::INFINITY);
        let scalars = [at.lr, max_norm, at.grad_scale].map(f64::to_bits);
        let [lr, max_norm, grad_scale] = scalars;
        let [loss_scale, growth, hysteresis] = self.loss_scale_words();
        let (steps, batches) = (self.progress.steps, self.progress.batches);
        let (sent, rules) = (self.operations(), of_groups(&self.groups));
        [steps, lr, max_norm, grad_scale, loss_scale, growth, hysteresis, batches, sent, rules]
    }

    pub(crate) fn traffic(&mut self) -> Traffic {
        let sent = self.reducer.sent();
        Traffic {
            sent: sent - self.progress.sent_before,
            copied: *self.progress.copied.get_mut(),
            peak: self.options.meter.peak_total(),
            pool_grown: self.reducer.grown(),
        }
    }

    /// Resets the progress of the step, whatever its outcome.
    pub(crate) fn forget(&mut self) -> Result<(), Error> {
        self.reducer.next_step().map_err(|error| self.reducer.abort_with(error))?;
        let progress = &mut self.progress;
        progress.present.iter_mut().for_each(|p| *p.get_mut() = false);
        (progress.batches, progress.weight, progress.weights) = (0, 0, 0);
        progress.dropped = false;
        *progress.unfinished.get_mut() = false;
        *progress.due.get_mut() = false;
        *progress.missing.get_mut() = usize::MAX;
        *progress.copied.get_mut() = 0;
        progress.sent_before = self.reducer.sent();
        Ok(())
    }
}

/// Returns the rows and columns of a two-dimensional parameter.
pub(crate) fn matrix(entry: &ParamEntry) -> Option<(usize, usize)> {
    if let &[rows, cols] = entry.param.shape() { Some((rows, cols)) } else { None }
}

/// Returns the norm of the gradients that `sum` covers, multiplied by `factor`; infinite if some are not finite.
pub(crate) fn reported(factor: f64, sum: &NormAccumulator) -> f64 {
    if sum.non_finite() > 0 { f64::INFINITY } else { factor * sum.finish() }
}

enum StepDecision {
    /// `norm` covers the gradients that have arrived.
    Apply {
        norm: f64,
        factor: f64,
        coef: f64,
    },
    Skip {
        non_finite: u64,
    },
}
