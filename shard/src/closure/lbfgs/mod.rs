//! L-BFGS over a layout with sharded parameters and history.

mod evaluate;
pub(crate) mod refusal;
pub(crate) mod shard;

pub(crate) use evaluate::{EvaluationFailed, backward};
pub use refusal::NotForLbfgs;

use crate::closure::minimize::{Minimized, Passed};
use crate::ranks::agree;
use crate::reduce::together::objection;
use crate::update::exact_reduce::{Folding, from_fold};
use crate::{Clip, Combine, Error, Missing, NonFinite, Optimizer, Options};
use evaluate::{Evaluation, Spread};
use meshstep_comm::Communicator;
use meshstep_optim::{Iterate, Lbfgs, LbfgsError, LbfgsReport, LbfgsState, Rounding, Sgd};
use meshstep_tensor::{Buffer, Category, Layout, Param, Slice, SliceMut};
use std::fmt::Write;
use std::sync::Arc;

/// [`Lbfgs`] on the parameters of a layout; each rank holds the history of its own shard, at most `2 (history_len + 1) + 6`
/// vectors of a shard. With [`Lbfgs::history`] of 16 bits, for f32 parameters on CPUs, `2 (history_len + 1)` of these take half the bytes
/// and there is one vector more. Results have the same bits on any number of ranks.
///
/// Every evaluation writes the point into the parameters this rank owns, gathers them, hands a
/// [`MicroBatch`](crate::MicroBatch) to the closure and reduces its gradients, under any [`Stage`](crate::Stage). A parameter
/// without a gradient counts as zeros, except under [`Missing::Error`](crate::Missing::Error).
///
/// With [`Options::queue`] on a GPU and a communicator of GPUs, all memory is on the GPU, and results have the CPU's bits
/// wherever NCCL's sums have. The closure reads parameters and hands over gradients on the GPU, in the queue's order. The host
/// chooses the step length, and waits for the result of each evaluation and for each exchange.
///
/// ```
/// use meshstep_optim::{Lbfgs, LineSearch};
/// use meshstep_shard::{Error, Options, ShardedLbfgs};
/// use meshstep_tensor::{DType, Layout, Slice, SliceMut};
///
/// let ends = meshstep_comm::loopback::spawn(3, |comm| -> Result<Vec<f64>, Error> {
///     let target = comm.rank() as f64; // each rank pulls towards its own number
///     let layout = Layout::builder().param("w", &[2], DType::F64).build()?;
///     let rule = Lbfgs { line_search: LineSearch::StrongWolfe, ..Lbfgs::default() };
///     let first = |_: &_, mut w: SliceMut<'_>| w.copy_from(Slice::from(&[9.0, -9.0][..]));
///     let mut opt = ShardedLbfgs::new(comm, layout, rule, first, Options::default())?;
///     let run = opt.minimize(|mb| {
///         let w = mb.param("w")?.typed::<f64>()?;
///         mb.grad("w", &w.iter().map(|w| w - target).collect::<Vec<_>>()[..])?;
///         Ok::<_, Error>(w.iter().map(|w| (w - target).powi(2) / 2.0).sum())
///     })?;
///     assert!(run.grad_norm < 1e-6);
///     Ok(opt.optimizer().param("w")?.typed::<f64>()?.to_vec())
/// })?;
/// assert!(ends.into_iter().all(|w| w.is_ok_and(|w| (w[0] - 1.0).abs() < 1e-6)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ShardedLbfgs {
    rule: Lbfgs,
    opt: Optimizer,
    spread: Spread,
    /// This rank's shard of the point.
    x: Buffer,
    state: LbfgsState,
    folding: Folding,
}

/// Result of a step: the same on every rank.
///
/// ```
/// use meshstep_optim::Lbfgs;
/// use meshstep_shard::prelude::*;
/// use meshstep_shard::LbfgsStep;
///
/// loopback::spawn(2, |comm| -> Result<(), meshstep_shard::Error> {
///     let layout = Layout::builder().param("w", &[1], DType::F64).build()?;
///     let mut opt = ShardedLbfgs::new(comm, layout, Lbfgs::default(), |_, _| Ok(()), Options::default())?;
///     let step: LbfgsStep = opt.step(|mb| -> Result<f64, meshstep_shard::Error> {
///         let w = mb.param("w")?.typed::<f64>()?[0];
///         mb.grad("w", &[w - 2.0])?;
///         Ok((w - 2.0).powi(2) / 2.0)
///     })?;
///     assert!(step.report.loss < 1e-12 && step.evaluating >= step.report.evaluations);
///     Ok(())
/// })?.into_iter().collect::<Result<(), _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LbfgsStep {
    /// The algorithm's report; `folds` are its exchanges, of one collective each.
    pub report: LbfgsReport,
    /// Collectives of the evaluations: gathers of parameters (without the closure's own), and reductions of gradients.
    pub evaluating: u64,
    /// Collectives that gather the parameters at the end of the step.
    pub publishing: u64,
}

/// Returns an option that only [`Optimizer::step`] carries out, if it is set.
fn of_a_step_alone(options: &Options) -> Option<&'static str> {
    match () {
        () if options.clip == Clip::BeforeReduce => Some("clip: Clip::BeforeReduce"),
        () if options.reduce_in_step => Some("reduce_in_step: true"),
        () if options.slots.is_some() => Some("slots"),
        () if options.loss_scale.is_some() => Some("loss_scale"),
        () if options.schedule.is_some() => Some("schedule"),
        () if options.non_finite == NonFinite::Propagate => Some("non_finite: NonFinite::Propagate"),
        () if options.missing == Missing::AllOrNone => Some("missing: Missing::AllOrNone"),
        () if options.precision.rounding == Rounding::Stochastic => Some("rounding: Rounding::Stochastic"),
        () => None,
    }
}

impl ShardedLbfgs {
    /// Builds an optimizer for the parameters of `layout`. Collective: every rank passes the same arguments, which is checked.
    ///
    /// Parameters are of one type, f32 or f64, or 16-bit with [`Options::precision`]. [`Combine::Mean`] and [`Combine::Sum`]
    /// combine losses as they combine gradients; [`Combine::Weighted`] is refused. Options that only an optimizer's own step
    /// carries out are refused too: clipping before the reduction, reductions in the step, slots, a loss scale, a schedule, stochastic rounding,
    /// [`Missing::AllOrNone`] and [`NonFinite::Propagate`].
    pub fn new(
        comm: Arc<dyn Communicator>,
        layout: Layout,
        rule: Lbfgs,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
        options: Options,
    ) -> Result<Self, Error> {
        // This type holds the state, so the optimizer's own rule has none.
        Self::over(Optimizer::new(comm, layout, Sgd::default(), initial, options)?, rule)
    }

    /// Builds L-BFGS over the parameters of `opt`, which several groups of ranks may share ([`Optimizer::add_parts`], as on a
    /// mesh): elements that several ranks hold count once. Collective.
    ///
    /// `opt` has a rule without state, such as [`Sgd`], which takes no step; options are those of [`new`](Self::new).
    pub fn over(mut opt: Optimizer, rule: Lbfgs) -> Result<Self, Error> {
        let made = opt
            .check_outcomes()
            .and_then(|()| opt.reducer.check_idle())
            .and_then(|()| Self::on(rule.clone(), &opt));
        let mut text = objection(made.as_ref().err());
        for (name, value) in rule.hyperparameters() {
            let _ = writeln!(text, "{name} of lbfgs = {value}");
        }
        // Ranks that gather sharded parameters meanwhile must not wait.
        let same = opt.apart_from_steps(|opt| {
            opt.reducer.barrier_all()?;
            agree::same_everywhere(&**opt.comm(), opt.options(), &text)
        });
        let (spread, x, state, folding) = made?;
        same?;
        Ok(ShardedLbfgs { rule, opt, spread, x, state, folding })
    }

    fn on(rule: Lbfgs, opt: &Optimizer) -> Result<(Spread, Buffer, LbfgsState, Folding), Error> {
        if opt.options().combine == Combine::Weighted {
            return Err(NotForLbfgs::Weights.into());
        }
        if let Some(option) = of_a_step_alone(opt.options()) {
            return Err(NotForLbfgs::Option { option }.into());
        }
        if opt.params.entries.iter().any(|entry| entry.paused) {
            return Err(NotForLbfgs::Option { option: "parameters frozen by Optimizer::set_frozen" }.into());
        }
        let rules = opt.params.groups.iter().map(|group| &group.rule);
        if let Some(rule) = rules.clone().find(|rule| !rule.state().is_empty()) {
            return Err(NotForLbfgs::State { rule: rule.name(), state: rule.state() }.into());
        }
        let Options { queue, meter, .. } = opt.options();
        let spread = Spread::new(opt)?;
        let (len, dtype) = (spread.len(), spread.dtype());
        let state = rule.state_on(len, dtype, queue, meter)?.counting(spread.counted(opt));
        let mut x = Buffer::zeroed_on(queue, len, dtype, meter, Category::Master)?;
        spread.read_params(opt, x.as_mut())?;
        let folding = Folding::new(Arc::clone(opt.comm()), meter)?.on(queue)?;
        let folding = folding.with_room(state.fold_words())?;
        Ok((spread, x, state, folding))
    }

    /// Takes up to `max_iter` iterations of [`Lbfgs`]. Collective. `closure` hands over gradients at the parameters it reads and
    /// returns the loss of its data; every rank calls it equally often. If it fails on one rank, every rank's step is an error,
    /// the parameters are at the last accepted point, and the next step continues from there. A failure of a single rank, such as
    /// lack of memory, ends the run: the other ranks get [`Error::Comm`], that rank the cause.
    pub fn step<E: Into<EvaluationFailed>>(
        &mut self,
        closure: impl FnMut(&crate::MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<LbfgsStep, Error> {
        self.step_watched(closure, |_| ())
    }

    /// Takes a [`step`](Self::step) to its end, and returns every iterate's loss and gradient norm.
    pub fn minimize<E: Into<EvaluationFailed>>(
        &mut self,
        closure: impl FnMut(&crate::MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<Minimized, Error> {
        let mut history = Vec::new();
        let step = self.step_watched(closure, |at| {
            history.push(Passed { loss: at.loss, grad_norm: at.grad_norm });
        })?;
        let LbfgsReport { loss, grad_norm, iterations, evaluations, stop, .. } = step.report;
        Ok(Minimized { loss, grad_norm, iterations, evaluations, stop, history })
    }

    /// Takes a [`step`](Self::step) and calls `each` with this rank's shard of every iterate that is accepted and evaluated.
    pub fn step_watched<E: Into<EvaluationFailed>>(
        &mut self,
        mut closure: impl FnMut(&crate::MicroBatch<'_>) -> Result<f64, E>,
        each: impl FnMut(&Iterate<'_>),
    ) -> Result<LbfgsStep, Error> {
        let ShardedLbfgs { rule, opt, spread, x, state, folding } = self;
        let before = state.iterations();
        opt.reducer.healthy()?;
        opt.reducer.check_idle()?;
        let mut evaluation = Evaluation { opt, spread, cause: None };
        let evaluate = |x: Slice<'_>, grad: SliceMut<'_>| evaluation.run(x, grad, &mut closure);
        let stepped = rule.step_with(x.as_mut(), evaluate, folding, state, each);
        let Evaluation { opt, cause, .. } = evaluation;
        // Iterations stay counted even if the history is forgotten.
        opt.decider.progress.steps += state.iterations() - before;
        let stepped = stepped.map_err(|error| match error {
            LbfgsError::Alone(error) => opt.reducer.abort_with(error.into()),
            LbfgsError::Reduce(error) => cause.unwrap_or(opt.reducer.abort_with(from_fold(error))),
            told => from_lbfgs(told),
        });
        if let Err(poisoned) = opt.reducer.healthy() {
            return Err(stepped.err().unwrap_or(poisoned));
        }
        // Every rank takes this decision alike, so that no rank gathers alone.
        spread.publish(opt, x.as_slice())?;
        opt.reducer.forget()?;
        let (report, (gathers, reductions)) = (stepped?, spread.collectives(opt));
        let evaluating = report.evaluations * (gathers + reductions);
        Ok(LbfgsStep { report, evaluating, publishing: gathers })
    }

    /// Adds parameters, between two steps. Collective, and checked as [`Optimizer::add_param_group`] is. The history is
    /// forgotten, because it covers fewer parameters: the next step begins along the gradient.
    ///
    /// One rule steps all parameters: a line search has one step length, so groups have no rates of their own.
    pub fn add_param_group(
        &mut self,
        layout: Layout,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        // Refuse parameters that the optimizer would take and L-BFGS would not, before anything changes.
        let first = self.spread.dtype();
        let fits = layout.params().iter().filter(|param| !param.frozen()).try_for_each(|param| {
            let kept = self.opt.params.options.precision.kept(param.name(), param.dtype())?;
            let other = kept.update;
            if other == first { Ok(()) } else { Err(NotForLbfgs::Types { first, other }.into()) }
        });
        let text = objection(fits.as_ref().err());
        let same = self.opt.apart_from_steps(|opt| {
            opt.reducer.barrier_all()?;
            agree::same_everywhere(&**opt.comm(), opt.options(), &text)
        });
        fits?;
        same?;
        self.opt.add_param_group(layout, Sgd::default(), initial)?;
        let made = Self::on(self.rule.clone(), &self.opt);
        let text = objection(made.as_ref().err());
        let same = self.opt.apart_from_steps(|opt| {
            opt.reducer.barrier_all()?;
            agree::same_everywhere(&**opt.comm(), opt.options(), &text)
        });
        // The optimizer has the parameters now, so without memory for their history the run ends.
        let made =
            made.and_then(|made| same.map(|_| made)).map_err(|error| self.opt.reducer.abort_with(error))?;
        (self.spread, self.x, self.state, self.folding) = made;
        Ok(())
    }

    /// Calls [`Optimizer::also_called`].
    pub fn also_called(&mut self, alias: &str, name: &str) -> Result<(), Error> {
        self.opt.also_called(alias, name)
    }

    /// Runs [`Optimizer::verify`] on the parameters, which are the point of the last evaluation. The history is not compared,
    /// because each rank holds its own except at stage 0: ranks with different steps get [`Error::Parted`].
    pub fn verify(&mut self) -> Result<crate::Verified, Error> {
        self.opt.verify()
    }

    /// Returns the optimizer that runs the evaluations, for reading: parameters, units, communicator.
    pub fn optimizer(&self) -> &Optimizer {
        &self.opt
    }

    /// Returns history and progress.
    pub fn state(&self) -> &LbfgsState {
        &self.state
    }
}

fn from_lbfgs(error: LbfgsError<Error>) -> Error {
    match error {
        LbfgsError::Closure(error) => error,
        LbfgsError::Elsewhere { part } => Error::ClosureElsewhere { rank: part },
        LbfgsError::NotFinite { loss, non_finite } => Error::NotFinite { loss, non_finite },
        LbfgsError::Invalid(error) => error.into(),
        _ => Error::Parted,
    }
}
