//! Decider of steps on the CPU: exchanges this rank's words, and applies or skips as all ranks do.

use crate::config::options::{Combine, NonFinite, Options, StepArgs};
use crate::config::param_groups::of_groups;
use crate::error::{Error, WeightError};
use crate::plan::step_plan::FIELDS;
use crate::reduce::reducer::GradReducer;
use crate::step::arguments::limit;
use crate::step::exchange::{self, Brought, Exchange, FaultCode, Known};
use crate::step::gpu::Launched;
use crate::update::params::Params;
use meshstep_comm::Communicator;
use meshstep_optim::{LossScaleState, NormAccumulator, clip_coef};
use std::sync::Arc;

/// Decides steps, and counts them. On a GPU the device decides, and the counters follow when its outcomes are known.
#[derive(Debug)]
pub(crate) struct Decider {
    pub(crate) exchange: Exchange,
    pub(crate) progress: StepProgress,
    /// True if some rank had a request to end the run when the last step was decided.
    pub(crate) preempted: bool,
    /// Steps launched on a GPU.
    pub(crate) launched: Launched,
}

/// Counters of the run, the same on every rank.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepProgress {
    /// Steps taken or skipped.
    pub(crate) steps: u64,
    /// Steps skipped in a row.
    pub(crate) skips: u32,
    /// Skips in a row since the loss scale could last fall.
    pub(crate) skips_at_min_scale: u32,
    /// Loss scale of the coming step, if there is one.
    pub(crate) loss_scale: Option<LossScaleState>,
}

/// Decision of a step, the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepDecision {
    /// Update with gradients times `factor` times `coef`. `norm` covers the gradients that have arrived; it is `complete` if a second
    /// exchange has covered all of them.
    Apply { norm: f64, factor: f64, coef: f64, complete: bool },
    /// Update nothing: so many elements were not finite.
    Skip { non_finite: u64 },
}

impl Decider {
    /// Makes a decider of a run that begins.
    pub(crate) fn new(options: &Options) -> Result<Self, Error> {
        let loss_scale = options.loss_scale.map(|rule| rule.start());
        Ok(Decider {
            exchange: Exchange::new([0, 0], options)?,
            progress: StepProgress { loss_scale, ..StepProgress::default() },
            preempted: false,
            launched: Launched::default(),
        })
    }

    /// Runs the exchange and derives the decision, the same on every rank. While buckets are still in flight the norm is
    /// incomplete, and does not influence the decision. `operations` is the digest of all that was sent.
    pub(crate) fn decide(
        &mut self,
        (params, reducer): (&Params, &mut GradReducer),
        at: &StepArgs,
        (fault, operations): (Option<FaultCode>, u64),
        norm: &NormAccumulator,
    ) -> Result<StepDecision, Error> {
        let comm = Arc::clone(reducer.config.words());
        let fields = self.fields(params, reducer, at, operations);
        self.record_gradients(&params.options, reducer, &*comm);
        let fault = exchange::fault_word(fault, comm.rank(), &params.options.preemption);
        let mine = Brought { weight: reducer.weight(), balance: reducer.balance(), norm, fault, fields };
        let known = self.exchange.run(&*comm, mine);
        // If a bucket in flight has failed, its error is the cause.
        let known = known.map_err(|error| reducer.settle().err().unwrap_or(error))?;
        if params.options.defers() {
            let (exchange, buckets) = (&self.exchange, params.buckets.len());
            reducer.defer(|b| exchange.lacked_somewhere(b, buckets));
        }
        self.preempted = exchange::is_preempted(known.fault);
        if exchange::is_fault(known.fault) {
            let (rank, fault) = exchange::decode_fault(known.fault, |param| params.name(param));
            return Err(Error::Fault { rank, fault });
        }
        if !known.same {
            return Err(exchange::disagreement(&*comm, &params.options, &fields, &params.groups)?);
        }
        self.exchange.check_presence(params, comm.world_size())?;
        if !known.balanced {
            return Err(reducer.unequal_weights(&*comm)?);
        }
        self.judge(&params.options, reducer.batches(), at, &known)
    }

    /// Writes down the gradients that this rank has and lacks.
    fn record_gradients(&mut self, options: &Options, reducer: &mut GradReducer, comm: &dyn Communicator) {
        if options.missing.counts() {
            self.exchange.present(comm.rank(), reducer.progress.present());
        }
        if options.defers() {
            self.exchange.lacked(reducer.lacked().iter().copied());
        }
    }

    fn judge(
        &self,
        options: &Options,
        batches: u64,
        at: &StepArgs,
        known: &Known,
    ) -> Result<StepDecision, Error> {
        let combined = match options.combine {
            Combine::Mean => 1.0 / batches as f64,
            Combine::Sum => 1.0,
            Combine::Weighted if known.weight == 0 => return Err(WeightError::AllZero.into()),
            Combine::Weighted => 1.0 / known.weight as f64,
        };
        let non_finite = known.norm.non_finite();
        if non_finite > 0 && options.non_finite == NonFinite::Skip {
            return Ok(StepDecision::Skip { non_finite });
        }
        let factor = self.unscale(options, at) * combined;
        let norm = reported(factor, &known.norm);
        let coef = limit(options, at).map_or(Ok(1.0), |max_norm| clip_coef(norm, max_norm))?;
        Ok(StepDecision::Apply { norm, factor, coef, complete: false })
    }

    /// Decides a clipped step anew, once the buckets that were kept back are reduced: it needs all ranks' norm. Collective.
    pub(crate) fn clip_late(
        &mut self,
        reducer: &mut GradReducer,
        decision: StepDecision,
        at: &StepArgs,
    ) -> Result<StepDecision, Error> {
        let StepDecision::Apply { factor, .. } = decision else { return Ok(decision) };
        let Some(max_norm) = limit(&reducer.config.options, at) else { return Ok(decision) };
        if !reducer.send_kept_back()? {
            return Ok(decision);
        }
        reducer.settle()?;
        let Some(norm) = self.norm_afterwards(reducer, factor)? else { return Ok(decision) };
        Ok(StepDecision::Apply { norm, factor, coef: clip_coef(norm, max_norm)?, complete: true })
    }

    /// Returns the norm of all ranks' gradients, now that all have arrived, if the step was decided without it. Collective.
    pub(crate) fn norm_afterwards(
        &mut self,
        reducer: &mut GradReducer,
        factor: f64,
    ) -> Result<Option<f64>, Error> {
        if reducer.config.options.non_finite == NonFinite::Skip {
            return Ok(None);
        }
        let norm = reducer.norm()?;
        let mine = Brought { norm: &norm, weight: 0, balance: 0, fault: 0, fields: [0; FIELDS.len()] };
        let known = self.exchange.run(&**reducer.config.words(), mine)?;
        Ok(Some(reported(factor, &known.norm)))
    }

    /// Returns the values that must be the same on every rank, in the order of [`FIELDS`].
    fn fields(
        &self,
        params: &Params,
        reducer: &GradReducer,
        at: &StepArgs,
        operations: u64,
    ) -> [u64; FIELDS.len()] {
        let max_norm = at.max_norm.unwrap_or(f64::INFINITY);
        let [lr, max_norm, grad_scale] = [at.lr, max_norm, at.grad_scale].map(f64::to_bits);
        let [loss_scale, growth, hysteresis] = self.loss_scale_words();
        let (steps, batches) = (self.progress.steps, reducer.batches());
        let rules = of_groups(&params.groups);
        [steps, lr, max_norm, grad_scale, loss_scale, growth, hysteresis, batches, operations, rules]
    }

    /// Counts a step that was applied.
    pub(crate) fn count_applied(&mut self, options: &Options) {
        (self.progress.skips, self.progress.skips_at_min_scale) = (0, 0);
        self.rescale(options, false);
    }

    /// Counts a step that was skipped. Returns the number of skips in a row, or an error if there are too many.
    pub(crate) fn count_skipped(&mut self, options: &Options) -> Result<u32, Error> {
        let skips = self.count_skip(options)?;
        self.rescale(options, true);
        Ok(skips)
    }

    /// Counts one more skip in a row. Returns the number of skips, or an error if there are too many.
    pub(crate) fn count_skip(&mut self, options: &Options) -> Result<u32, Error> {
        let falls = self.scale_can_fall(options);
        let progress = &mut self.progress;
        progress.skips += 1;
        progress.skips_at_min_scale = if falls { 0 } else { progress.skips_at_min_scale + 1 };
        let skips = progress.skips;
        if progress.skips_at_min_scale > options.max_skips {
            Err(Error::TooManySkips { skips })
        } else {
            Ok(skips)
        }
    }

    /// Returns the steps taken or skipped, and those launched on a GPU that are not decided yet.
    pub(crate) fn steps(&self) -> u64 {
        self.progress.steps + self.launched.len()
    }

    /// Returns the scheduled rate of the next step.
    pub(crate) fn scheduled_lr(&self, options: &Options) -> Option<f64> {
        options.schedule.as_ref().map(|schedule| schedule.at(self.steps()))
    }

    /// Returns the loss that the ranks have together: the error of the lowest rank without one; `told` is this rank's.
    /// Collective.
    pub(crate) fn borrow_words(
        &mut self,
        reducer: &GradReducer,
        sums: &mut [u64],
        maxima: &mut [u64],
    ) -> Result<(), Error> {
        let exchanged = self.exchange.borrow(&*reducer.config.comm, sums, maxima);
        Ok(exchanged.inspect_err(|failure| reducer.poison(failure.clone()))?)
    }
}

/// Returns the norm of the gradients that `sum` covers, multiplied by `factor`; infinite if some are not finite.
fn reported(factor: f64, sum: &NormAccumulator) -> f64 {
    if sum.non_finite() > 0 { f64::INFINITY } else { factor * sum.finish() }
}
