//! A worker: a sharded optimizer of its own that meets the others by a plan.

use super::engine::{Engine, Exchanged};
use super::spots::check_memory;
use super::{LocalError, LocalPlan, LocalWarning, Placement, Workers};
use crate::ranks::agree;
use crate::step::hooks::Around;
use crate::{At, Error, MicroBatch, Optimizer, Options, Outcome, ParamState};
use meshstep_tensor::{Buffer, Slice};
use std::fmt::Write;

/// One worker's optimizer on one of its ranks: an [`Optimizer`] at any stage over the worker's ranks, and what workers exchange.
///
/// A step is an [`Optimizer::step`] of the worker alone: norm, clipping and skipping are its own. Where the plan has something due, all
/// ranks of all workers agree, exchange what they own of it, vote, and apply it everywhere or nowhere, before parameters are gathered
/// within the worker: no byte more travels there.
///
/// ```
/// use meshstep_optim::Sgd;
/// use meshstep_shard::local::{LocalOptimizer, LocalPlan, Workers};
/// use meshstep_shard::{At, Optimizer, Options};
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
///         local.step(At { lr: 1.0, ..At::default() })?;
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

/// What a step did, on this worker and between workers.
#[derive(Clone, Debug, PartialEq)]
#[must_use = "the outcome says whether the step was applied or skipped, and what was exchanged"]
pub struct LocalStep {
    /// Which step it was, from 0.
    pub step: u64,
    /// What the worker's own step did: the same on its ranks.
    pub outcome: Outcome,
    /// What became of fragments: the same on all ranks of all workers.
    pub exchanged: Exchanged,
}

impl LocalOptimizer {
    /// A worker of several, which all have the same plan, parameters, rules and values; this is checked. Collective over all
    /// ranks of all workers; every error is every rank's.
    ///
    /// 16-bit parameters have an f32 master, which is what is averaged then. On a GPU the communicators are NCCL's, an outer
    /// optimizer's rule has CUDA kernels, and this call copies each vector to the host once, to compare workers' first values.
    pub fn new(inner: Optimizer, workers: Workers, plan: LocalPlan) -> Result<Self, LocalError> {
        let (params, _) = inner.trained();
        let checked = check_memory(&inner, &plan).and_then(|()| plan.check(&params));
        let made = checked.and_then(|warnings| {
            let text = describe(&inner, &workers, &plan)?;
            Ok((Engine::new(plan, workers.clone(), &inner)?, warnings, text))
        });
        let text = match &made {
            Ok((.., text)) => text.clone(),
            Err(error) => format!("this call = {error}\n"),
        };
        let same = agree::same_everywhere(&*workers.world, inner.options(), &text);
        let (engine, warnings, _) = made?;
        same?;
        let alike = values_alike(&inner, &workers)?;
        if let Some(rank) = alike {
            return Err(LocalError::Values { rank });
        }
        Ok(LocalOptimizer { inner, engine, warnings })
    }

    /// What the plan allows and its method advises against.
    pub fn warnings(&self) -> &[LocalWarning] {
        &self.warnings
    }

    /// The worker's own optimizer.
    pub fn optimizer(&self) -> &Optimizer {
        &self.inner
    }

    /// The plan.
    pub fn plan(&self) -> &LocalPlan {
        &self.engine.plan
    }

    /// Steps taken, skipped or in error: the same on all workers.
    pub fn steps(&self) -> u64 {
        self.engine.step
    }

    /// Begins the step's last micro-batch ([`Optimizer::micro_batch`]); its weight is what [`Weights::Tokens`](super::Weights) counts.
    pub fn micro_batch(&mut self, weight: u64) -> Result<MicroBatch<'_>, Error> {
        self.inner.micro_batch(weight)
    }

    /// Begins a micro-batch that others of the same step follow ([`Optimizer::accumulate`]).
    pub fn accumulate(&mut self, weight: u64) -> Result<MicroBatch<'_>, Error> {
        self.inner.accumulate(weight)
    }

    /// The values of a parameter ([`Optimizer::param`]): this worker's.
    pub fn param(&self, name: &str) -> Result<Slice<'_>, Error> {
        self.inner.param(name)
    }

    /// This rank's part of a parameter and its state ([`Optimizer::state`]).
    pub fn state(&self, name: &str) -> Result<ParamState<'_>, Error> {
        self.inner.state(name)
    }

    /// The outer parameters of fragment `fragment` on this rank, one slice for each of its stretches: what its last exchange came to,
    /// from which the next outer gradient counts. All workers keep the same, also where a result is on its way or only a share of it
    /// is mixed in. Empty where the fragment has no outer optimizer.
    pub fn outer_params(&self, fragment: usize) -> impl Iterator<Item = Slice<'_>> {
        let has = self.engine.plan.fragments.get(fragment).is_some_and(|fragment| fragment.outer().is_some());
        let kept = has.then(|| &self.engine.parts.of(fragment).kept);
        kept.into_iter().flatten().filter_map(|kept| kept.anchor.as_ref()).map(Buffer::as_slice)
    }

    /// This worker's values count for nothing, with its steps, until an exchange has come about: it has only just come.
    pub fn enter(&mut self) {
        self.engine.active = false;
    }

    /// Takes the worker's step, and whatever is due between workers. Collective over the worker's ranks; where something is due over
    /// all workers', who take equally many steps.
    ///
    /// On a GPU the host waits for the outcome, and in a step that exchanges for the decision before the update too.
    ///
    /// An error of the worker's step is its ranks' alone: the others' exchange, if one was due, has not come about, as their
    /// [`Exchanged::failed`] says. [`LocalError::Workers`] is a step that was taken and workers that can no longer exchange: what
    /// was due has its policy, and the next that is due is an error again.
    pub fn step(&mut self, at: At) -> Result<LocalStep, LocalError> {
        // What several ranks compute together is seen once.
        let tokens = if self.inner.handover.fixed.place.first { self.inner.progress.weight } else { 0 };
        let mut around = Meeting { tokens, engine: &mut self.engine, begun: false, counted: false };
        let stepped = self.inner.step_around(at, &mut around).and_then(crate::Pending::outcome);
        if matches!(stepped, Ok(Outcome::Applied { .. })) {
            around.count();
        }
        let met = match &stepped {
            Ok(_) => Ok(()),
            Err(_) if around.begun || self.inner.handover.healthy().is_err() => Ok(()),
            Err(_) => self.meet_without_step(),
        };
        let step = self.engine.step;
        self.engine.step += 1;
        self.engine.changed = false;
        let exchanged = std::mem::take(&mut self.engine.report);
        let ended = self.end(stepped.is_ok());
        // No later step's, whatever becomes of this one.
        let failure = self.engine.failure.take();
        let outcome = stepped?;
        met?;
        ended?;
        match failure {
            // The next exchange is with those that are left.
            Some(_) if self.engine.following.is_some() => Ok(LocalStep { step, outcome, exchanged }),
            Some(source) => Err(LocalError::Workers { source: Box::new(source) }),
            None => Ok(LocalStep { step, outcome, exchanged }),
        }
    }

    /// After a step: nobody waits for this worker.
    fn end(&mut self, stepped: bool) -> Result<(), LocalError> {
        let ended = match self.inner.handover.healthy() {
            Ok(()) => self.engine.end_step(stepped).map_err(|error| self.inner.handover.alone(error)),
            Err(_) => Ok(Ok(())),
        };
        if self.inner.handover.healthy().is_err() {
            self.engine.part();
        }
        Ok(ended??)
    }

    /// The others wait for a worker whose step was an error.
    fn meet_without_step(&mut self) -> Result<(), Error> {
        for placement in [Placement::Before, Placement::After] {
            let met = self.engine.meet(&mut self.inner, placement, true);
            met.map_err(|error| self.inner.handover.alone(error))?;
        }
        if self.engine.changed {
            self.inner.gather_all()?;
        }
        self.inner.keep_if_due()
    }
}

/// An exchange around the update of the worker's step.
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

impl Around for Meeting<'_> {
    fn holds(&self) -> bool {
        self.engine.is_due(Placement::After)
    }

    #[cfg(feature = "cuda")]
    fn waits(&self) -> bool {
        [Placement::Before, Placement::After].into_iter().any(|placement| self.engine.is_due(placement))
    }

    fn before(&mut self, optimizer: &mut Optimizer) -> Result<(), Error> {
        self.begun = true;
        self.engine.meet(optimizer, Placement::Before, false)
    }

    fn after(&mut self, optimizer: &mut Optimizer, applied: bool) -> Result<(), Error> {
        if applied {
            self.count();
        }
        self.engine.meet(optimizer, Placement::After, false)
    }

    fn changed(&self) -> bool {
        self.engine.changed
    }
}

/// What all ranks of all workers must have alike.
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

/// Its parameters, their rules, and which ranks own what of them.
pub(crate) fn rules(inner: &Optimizer) -> String {
    let Options { stage, precision, bucket_len, .. } = &inner.options;
    let mut text = format!("stage = {stage:?}\nprecision = {precision:?}\nbucket_len = {bucket_len:?}\n");
    text += &inner.arrangement;
    for param in inner.trained().0 {
        let (name, len, whole, values) = (&param.name, param.len, param.whole, param.values);
        let _ = writeln!(text, "length of {name:?} = {len} of {whole} {values}");
        let _ = writeln!(text, "rule of {:?} = {}", param.name, param.rule.name());
        for (name, value) in param.rule.hyperparameters() {
            let _ = writeln!(text, "{name} of {:?} = {value}", param.name);
        }
    }
    text
}

/// The first rank whose values are not those that the same rank of the first worker has. Collective over all workers.
fn values_alike(inner: &Optimizer, workers: &Workers) -> Result<Option<usize>, Error> {
    let mut digest = 0;
    for owned in &inner.buckets {
        let vectors = [owned.params()?].into_iter();
        let state = owned.state().iter().chain(owned.master()).map(meshstep_tensor::Buffer::as_slice);
        for vector in vectors.chain(state) {
            let own = crate::ranks::host_words::digest(&inner.options.queue, &inner.options.meter, vector)?;
            digest = crate::reduce::reducer::digest(digest, own, 0);
        }
    }
    let mine = [inner.comm().rank() as u64, workers.across.rank() as u64, digest];
    let all = agree::gather_words(&*workers.world, inner.options(), &mine)?;
    let ranks: Vec<&[u64]> = all.chunks(mine.len()).collect();
    let differs = |words: &&[u64]| {
        let first = ranks.iter().find(|first| first[0] == words[0] && first[1] == 0);
        first.is_none_or(|first| first[2] != words[2])
    };
    Ok(ranks.iter().position(differs))
}
