//! A worker: a sharded optimizer that exchanges with other workers by a plan.

use crate::exchange::engine::{Engine, Exchanged};
use crate::exchange::owned_spans::{check_memory, trained};
use crate::{LocalError, LocalPlan, LocalWarning, Placement, Workers};
use meshstep_shard::extend::{
    OptimizerExchange, OptimizerShard, Params, UpdateHooks, VectorKind, host_words, mix_digest,
};
use meshstep_shard::{Error, Optimizer, Options, Outcome, Pending, StepArgs, gather_words, same_everywhere};
use meshstep_tensor::{Buffer, Slice};
use std::fmt::Write;

/// One worker's optimizer on one of its ranks: an [`Optimizer`] at any stage over the worker's ranks, and the exchanges between
/// workers.
///
/// A step is an [`Optimizer::step`] of the worker alone: norm, clipping and skipping are the worker's own. If the plan has
/// fragments due, all ranks of all workers agree, exchange the parts that they own, vote, and apply the exchange everywhere or
/// nowhere. This happens before parameters are gathered within the worker, so the gather sends no extra bytes.
///
/// ```
/// use meshstep_optim::Sgd;
/// use meshstep_local::{LocalOptimizer, LocalPlan, Workers};
/// use meshstep_shard::{Optimizer, Options, Step, StepArgs};
/// use meshstep_tensor::{DType, Layout};
///
/// // Two workers of two ranks each; worker w's gradient is w + 1.
/// let finals = meshstep_comm::loopback::spawn(4, |world| -> Result<f32, Box<dyn std::error::Error + Send + Sync>> {
///     let worker = world.rank() / 2;
///     let (inside, workers) = Workers::split(world, worker as u32)?;
///     let layout = Layout::builder().param("w", &[1], DType::F32).build()?;
///     let optimizer = Optimizer::new(inside, layout, Sgd::default(), |_, _| Ok(()), Options::default())?;
///     let mut local = LocalOptimizer::new(optimizer, workers, LocalPlan::local_sgd(2))?;
///     for _ in 0..2 {
///         let mb = local.micro_batch(1)?;
///         mb.grad("w", &[worker as f32 + 1.0][..])?;
///         mb.finish()?;
///         local.step(StepArgs { lr: 1.0, ..StepArgs::default() })?;
///     }
///     Ok(local.param("w")?.typed::<f32>()?[0])
/// })?;
/// assert!(finals.iter().all(|w| w.as_ref().is_ok_and(|&w| w == -3.0)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LocalOptimizer {
    pub(crate) inner: Optimizer,
    pub(crate) engine: Engine,
    warnings: Vec<LocalWarning>,
}

/// Outcome of a step, on this worker and between workers.
///
/// ```
/// use meshstep_local::{Exchanged, LocalOptimizer, LocalPlan, LocalStep, Veto, Workers};
/// use meshstep_shard::prelude::*;
///
/// type Failed = Box<dyn std::error::Error + Send + Sync>;
///
/// let ranks = loopback::spawn(2, |world| -> Result<(), Failed> {
///     let rank = world.rank();
///     let (comm, workers) = Workers::split(world, rank as u32)?;
///     let layout = Layout::builder().param("w", &[1], DType::F32).build()?;
///     let options = Options { non_finite: NonFinite::Propagate, ..Options::default() };
///     let inner = Optimizer::new(comm, layout, Sgd::default(), |_, _| Ok(()), options)?;
///     let mut local = LocalOptimizer::new(inner, workers, LocalPlan::local_sgd(1))?;
///     let mut step = |grad: f32| -> Result<LocalStep, Failed> {
///         let mb = local.micro_batch(1)?;
///         mb.grad("w", &[grad])?;
///         mb.finish()?;
///         Ok(local.step(StepArgs { lr: 1.0, ..StepArgs::default() })?)
///     };
///     let first = step(1.0)?;
///     assert_eq!((first.step, first.exchanged.merged), (0, vec![0]));
///     // A worker with an infinite parameter spoils no other: the exchange fails on all.
///     let Exchanged { failed, .. } = step(if rank == 1 { f32::INFINITY } else { 0.0 })?.exchanged;
///     assert!(matches!(failed[..], [(0, Veto::NotFinite { .. })]), "{failed:?}");
///     Ok(())
/// })?;
/// ranks.into_iter().collect::<Result<(), Failed>>().map_err(|error| error.to_string())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use = "the outcome says whether the step was applied or skipped, and what was exchanged"]
pub struct LocalStep {
    /// Index of the step, from 0.
    pub step: u64,
    /// Outcome of the worker's own step, the same on all its ranks.
    pub outcome: Outcome,
    /// Outcome of the exchanges, the same on all ranks of all workers.
    pub exchanged: Exchanged,
}

impl LocalOptimizer {
    /// Creates one of several workers, and checks that all have the same plan, parameters, rules and values. Collective over all
    /// ranks of all workers; an error is returned on every rank.
    ///
    /// 16-bit parameters need an f32 master, and the master is averaged. On a GPU the communicators must be NCCL's and an outer
    /// optimizer's rule needs CUDA kernels; this call copies each vector to the host once, to compare workers' first values.
    pub fn new(inner: Optimizer, workers: Workers, plan: LocalPlan) -> Result<Self, LocalError> {
        let (params, _) = trained(&inner);
        let checked = check_memory(&inner, &plan).and_then(|()| plan.check(&params));
        let made = checked.and_then(|warnings| {
            let text = describe(&inner, &workers, &plan)?;
            Ok((Engine::new(plan, workers.clone(), &inner)?, warnings, text))
        });
        let text = match &made {
            Ok((.., text)) => text.clone(),
            Err(error) => format!("this call = {error}\n"),
        };
        let same = same_everywhere(&*workers.world, inner.options(), &text);
        let (engine, warnings, _) = made?;
        same?;
        let alike = values_alike(&inner, &workers)?;
        if let Some(rank) = alike {
            return Err(LocalError::Values { rank });
        }
        Ok(LocalOptimizer { inner, engine, warnings })
    }

    /// Returns the warnings about the plan: allowed settings that its method advises against.
    pub fn warnings(&self) -> &[LocalWarning] {
        &self.warnings
    }

    /// Returns the plan.
    pub fn plan(&self) -> &LocalPlan {
        &self.engine.plan
    }

    /// Returns the number of steps taken, skipped or in error, the same on all workers.
    pub fn steps(&self) -> u64 {
        self.engine.step
    }

    /// Returns the outer parameters of fragment `fragment` on this rank, one slice for each of its ranges: the result of its last
    /// exchange, from which the next outer gradient is computed. They are the same on all workers, even with a result in flight or
    /// with only a share of it mixed in. Empty for a fragment without an outer optimizer.
    pub fn outer_params(&self, fragment: usize) -> impl Iterator<Item = Slice<'_>> {
        let has = self.engine.plan.fragments.get(fragment).is_some_and(|fragment| fragment.outer().is_some());
        let kept = has.then(|| &self.engine.parts.of(fragment).kept);
        kept.into_iter().flatten().filter_map(|kept| kept.anchor.as_ref()).map(Buffer::as_slice)
    }

    /// Marks this worker as new: its values and steps do not count until an exchange has succeeded.
    pub fn enter(&mut self) {
        self.engine.active = false;
    }

    /// Takes the worker's step and the exchanges that are due.
    pub(crate) fn step_and_exchange(&mut self, at: StepArgs) -> Result<LocalStep, LocalError> {
        // Tokens that several ranks process together are counted once.
        let tokens = self.inner.own_weight();
        let mut hooks = Meeting { tokens, engine: &mut self.engine, begun: false, counted: false };
        let stepped = self.inner.step_with_hooks(at, &mut hooks).and_then(Pending::outcome);
        if matches!(stepped, Ok(Outcome::Applied { .. })) {
            hooks.count();
        }
        let met = match &stepped {
            Ok(_) => Ok(()),
            Err(_) if hooks.begun || self.inner.healthy().is_err() => Ok(()),
            Err(_) => self.meet_without_step(),
        };
        let step = self.engine.step;
        self.engine.step += 1;
        self.engine.changed = false;
        let exchanged = std::mem::take(&mut self.engine.report);
        let ended = self.end(stepped.is_ok());
        // The failure belongs to this step, and not to a later one.
        let failure = self.engine.failure.take();
        let outcome = stepped?;
        met?;
        ended?;
        match failure {
            // The next exchange is with the remaining members.
            Some(_) if self.engine.following.is_some() => Ok(LocalStep { step, outcome, exchanged }),
            Some(source) => Err(LocalError::Workers { source: Box::new(source) }),
            None => Ok(LocalStep { step, outcome, exchanged }),
        }
    }

    /// Ends the step, so that the others do not wait for this worker.
    fn end(&mut self, stepped: bool) -> Result<(), LocalError> {
        let ended = match self.inner.healthy() {
            Ok(()) => self.engine.end_step(stepped).map_err(|error| self.inner.abort_with(error)),
            Err(_) => Ok(Ok(())),
        };
        if self.inner.healthy().is_err() {
            self.engine.part();
        }
        Ok(ended??)
    }

    /// Takes part in the step's exchanges after an error, as the other workers wait for this one.
    fn meet_without_step(&mut self) -> Result<(), Error> {
        for placement in [Placement::Before, Placement::After] {
            let met = self.engine.meet(self.inner.own_params_mut(), placement, true);
            met.map_err(|error| self.inner.abort_with(error))?;
        }
        if self.engine.changed {
            self.inner.gather_all()?;
        }
        self.inner.keep_if_due()
    }
}

/// Hooks that exchange before and after the update of the worker's step.
struct Meeting<'a> {
    engine: &'a mut Engine,
    tokens: u64,
    begun: bool,
    counted: bool,
}

impl Meeting<'_> {
    /// Counts the step's tokens, once.
    fn count(&mut self) {
        if !std::mem::replace(&mut self.counted, true) {
            self.engine.parts.count(self.tokens);
        }
    }
}

impl UpdateHooks for Meeting<'_> {
    fn holds(&self) -> bool {
        self.engine.is_due(Placement::After)
    }

    fn waits(&self) -> bool {
        [Placement::Before, Placement::After].into_iter().any(|placement| self.engine.is_due(placement))
    }

    fn before(&mut self, params: &mut Params) -> Result<(), Error> {
        self.begun = true;
        self.engine.meet(params, Placement::Before, false)
    }

    fn after(&mut self, params: &mut Params, applied: bool) -> Result<(), Error> {
        if applied {
            self.count();
        }
        self.engine.meet(params, Placement::After, false)
    }

    fn changed(&self) -> bool {
        self.engine.changed
    }
}

/// Describes the settings that the ranks of all workers must share.
pub(crate) fn describe(inner: &Optimizer, workers: &Workers, plan: &LocalPlan) -> Result<String, LocalError> {
    let (ranks, of, inside) =
        (workers.world.world_size(), workers.across.world_size(), inner.comm().world_size());
    if ranks != of * inside {
        return Err(LocalError::Sizes { ranks, workers: of, inside });
    }
    let mut text = plan.describe();
    let _ = writeln!(text, "local plan hash = {:016x}", plan.hash());
    let _ = writeln!(text, "workers = {of}\nranks of a worker = {inside}");
    Ok(text + &rules(inner))
}

/// Describes the parameters, their rules, and the division of ownership.
pub(crate) fn rules(inner: &Optimizer) -> String {
    let Options { stage, precision, bucket_len, .. } = inner.options();
    let mut text = format!("stage = {stage:?}\nprecision = {precision:?}\nbucket_len = {bucket_len:?}\n");
    text += inner.own_params().arrangement();
    for param in trained(inner).0 {
        let (name, len, whole, values) = (&param.name, param.len, param.whole, param.values);
        let _ = writeln!(text, "length of {name:?} = {len} of {whole} {values}");
        let _ = writeln!(text, "rule of {:?} = {}", param.name, param.rule.name());
        for (name, value) in param.rule.hyperparameters() {
            let _ = writeln!(text, "{name} of {:?} = {value}", param.name);
        }
    }
    text
}

/// Returns the first rank with values that differ from those of the same rank of the first worker. Collective over all workers.
fn values_alike(inner: &Optimizer, workers: &Workers) -> Result<Option<usize>, Error> {
    let mut digest = 0;
    let (params, Options { queue, meter, .. }) = (inner.own_params(), inner.options());
    params.wait()?;
    for bucket in 0..params.bucket_count() {
        let of = |kind| params.bucket_vector(bucket, kind);
        let state = (0..).map_while(|slot| of(VectorKind::State(slot)));
        let vectors = of(VectorKind::Params).into_iter().chain(state).chain(of(VectorKind::Master));
        for vector in vectors {
            digest = mix_digest(digest, host_words::digest(queue, meter, vector)?, 0);
        }
    }
    let mine = [inner.comm().rank() as u64, workers.across.rank() as u64, digest];
    let all = gather_words(&*workers.world, inner.options(), &mine)?;
    let ranks: Vec<&[u64]> = all.chunks(mine.len()).collect();
    let differs = |words: &&[u64]| {
        let first = ranks.iter().find(|first| first[0] == words[0] && first[1] == 0);
        first.is_none_or(|first| first[2] != words[2])
    };
    Ok(ranks.iter().position(differs))
}
