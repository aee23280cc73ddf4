//! One worker: trains its copy of the network on its batches, and takes part in the exchanges.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use meshstep_comm::Communicator;
use meshstep_membership::{Departure, InProcess, InProcessWorker, Membership as _, Round};
use meshstep_optim::schedule::Schedule as Rates;
use meshstep_shard::local::{LocalOptimizer, Workers};
use meshstep_shard::{MicroBatch, Optimizer, Options, Outcome, StepArgs};
use meshstep_tensor::{Slice, SliceMut};
use serde::Serialize;

use super::gate::Gate;
use super::job::Job;
use super::link::{Link, alone};
use super::schedule::Loss;
use crate::corpus::Place;
use crate::gpt::{Gpt, Param, with_values};
use crate::progress::Progress;
use crate::train::MAX_NORM;
use crate::train::compare::Finals;

/// Time limit for waiting on other workers; one may be an exchange behind on a busy machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// Result of one worker.
#[derive(Clone, Debug, Default)]
pub(super) struct Done {
    pub(super) worker: usize,
    /// First step of the worker.
    pub(super) began: u64,
    /// Loss of each step.
    pub(super) losses: Vec<f64>,
    /// Bytes sent after each step.
    pub(super) sent: Vec<u64>,
    /// Total bytes sent.
    pub(super) total: u64,
    /// Measured held-out losses on the worker's share, with the number of steps.
    pub(super) held_out: Vec<(u64, f64)>,
    /// Way in which the worker was lost, if it ended before the others.
    pub(super) lost: Option<Loss>,
    /// Members by epoch.
    pub(super) epochs: Vec<Epoch>,
    /// Steps with a failed exchange.
    pub(super) failed: Vec<u64>,
    /// Planned bytes of successful exchanges; `None` if they cannot be attributed to single exchanges.
    pub(super) planned: Option<u64>,
    /// Number of exchanges with other bytes than planned.
    pub(super) unplanned: usize,
    /// Unplanned bytes: state for joining workers, and failed exchanges.
    pub(super) besides: u64,
    /// Final parameters of the worker.
    pub(super) finals: Finals,
    /// Final parameters of the outer optimizers.
    pub(super) outer: Finals,
}

/// Members from an exchange on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Epoch {
    /// Step of the exchange.
    pub(crate) step: u64,
    pub(crate) number: u64,
    pub(crate) members: Vec<u64>,
    /// Members that have just joined, and count from the next exchange on.
    pub(crate) new: Vec<u64>,
    /// Former members, with the reason for their departure.
    pub(crate) gone: Vec<(u64, String)>,
}

/// Optimizer of one worker, or of all workers together.
enum Stepper {
    /// Reduces gradients in every step; the number is the steps taken.
    Together(Box<Optimizer>, u64),
    Alone(Box<LocalOptimizer>),
}

/// Shared state of a training with changing workers.
pub(super) struct Chaos<'a> {
    pub(super) gate: &'a Gate,
    pub(super) members: &'a InProcess,
}

/// State of a worker during the training.
struct Worker<'a> {
    job: &'a Job<'a>,
    gpt: Gpt,
    stepper: Stepper,
    link: Link,
    rates: Rates,
    done: Done,
}

/// Trains with workers that all stay from the first step to the last.
pub(super) fn train(job: &Job<'_>, world: Arc<dyn Communicator>, progress: &Progress) -> Result<Done> {
    let worker = world.rank();
    let (stepper, link) = match &job.method.plan {
        None => {
            let link = Link::of(Workers { world: Arc::clone(&world), across: Arc::clone(&world) });
            (Stepper::Together(Box::new(optimizer(job, world)?), 0), link)
        }
        Some(plan) => {
            let (inside, workers) = Workers::split(world, worker as u32)?;
            let local = LocalOptimizer::new(optimizer(job, inside)?, workers.clone(), plan.clone())?;
            (Stepper::Alone(Box::new(local)), Link::of(workers))
        }
    };
    let mut this = Worker::new(job, worker, stepper, link)?;
    this.link.begin();
    while this.stepper.steps() < job.steps as u64 {
        this.step(progress)?;
    }
    this.link.settle()?;
    this.done.planned = Some(job.planned(job.first, worker, 0..job.steps as u64)?);
    this.end(None)
}

/// Trains one worker among changing workers.
pub(super) fn train_in_chaos(
    job: &Job<'_>,
    worker: usize,
    chaos: &Chaos<'_>,
    progress: &Progress,
) -> Result<Done> {
    let watch = chaos.gate.watch();
    let comes = job.schedule.comes(worker);
    match comes {
        // Workers join in order of their numbers, so that ranks are deterministic: a new worker receives the state of the
        // first member.
        Some(step) => {
            chaos.gate.wait_for(step)?;
            let before = job.schedule.coming(step).filter(|other| *other < worker);
            chaos.gate.reach(step, before, chaos.members)?;
        }
        None => chaos.gate.reach(0, 0..worker, chaos.members)?,
    }
    let plan = job.method.plan.clone().context("--chaos needs a method with a plan")?;
    let inner = optimizer(job, alone()?)?;
    let digest = plan.digest(&inner);
    let member = Arc::new(chaos.members.join(worker as u64, digest, PATIENCE)?);
    let mut link = Link::default();
    let mut epochs = Vec::new();
    let local = LocalOptimizer::join(inner, plan, Arc::clone(&member) as _, |round| {
        epochs.push(Epoch::of(round));
        link.connect(&member, round)
    })?;
    let mut this = Worker::new(job, worker, Stepper::Alone(Box::new(local)), link)?;
    (this.done.epochs, this.done.planned) = (epochs, job.method.is_prompt().then_some(0));
    match comes {
        // A joining worker forwards the received state; these bytes are unplanned.
        Some(_) => this.done.besides = this.link.sent(),
        None => this.link.begin(),
    }
    let lost = this.follow(chaos, &member, progress)?;
    let done = this.end(lost)?;
    watch.well();
    Ok(done)
}

impl<'a> Worker<'a> {
    fn new(job: &'a Job<'a>, worker: usize, stepper: Stepper, link: Link) -> Result<Self> {
        let done = Done { worker, began: stepper.steps(), ..Done::default() };
        let (gpt, rates) = (Gpt::new(job.model, job.batch)?, job.method.schedule(job.steps)?);
        let this = Worker { job, gpt, stepper, link, rates, done };
        this.refresh()?;
        Ok(this)
    }

    /// Steps until the end or until the worker is lost. Returns the way in which it was lost.
    fn follow(
        &mut self,
        chaos: &Chaos<'_>,
        member: &InProcessWorker,
        progress: &Progress,
    ) -> Result<Option<Loss>> {
        let lost = self.job.schedule.lost(self.done.worker);
        while self.stepper.steps() < self.job.steps as u64 {
            let step = self.stepper.steps();
            let here = lost.filter(|(at, _)| step >= *at).map(|(_, loss)| loss);
            match here {
                Some(Loss::Leaves) => {
                    member.leave()?;
                    return Ok(here);
                }
                Some(Loss::Dies) => return Ok(here),
                _ => {
                    // A worker that joins at this step has already waited for the others that join with it.
                    let others = self.job.schedule.coming(step).filter(|_| self.done.began < step);
                    chaos.gate.reach(step, others, chaos.members)?;
                }
            }
            let before = self.link.sent();
            self.meet(member)?;
            self.done.besides += self.link.sent() - before;
            if here.is_some() {
                return Ok(here);
            }
            self.step(progress)?;
        }
        Ok(None)
    }

    /// Before an exchange: waits for the other workers, and connects to the current members.
    fn meet(&mut self, member: &InProcessWorker) -> Result<()> {
        let Stepper::Alone(local) = &mut self.stepper else { return Ok(()) };
        let (link, epochs) = (&mut self.link, &mut self.done.epochs);
        local.follow(|round| {
            epochs.push(Epoch::of(round));
            link.connect(member, round)
        })?;
        Ok(())
    }

    /// Takes one step with its exchanges, and records the results.
    fn step(&mut self, progress: &Progress) -> Result<()> {
        let step = self.stepper.steps();
        let loss = self.backward(step)?;
        progress.report(loss);
        self.done.losses.push(loss);
        let before = self.link.sent();
        let at = StepArgs { lr: self.rates.at(step), max_norm: Some(MAX_NORM), ..StepArgs::default() };
        let came_about = self.stepper.step(at)?;
        let sent = self.link.sent();
        self.account(step, sent - before, came_about)?;
        self.done.sent.push(sent);
        self.refresh()?;
        if self.job.is_measured_after(step + 1) {
            self.done.held_out.push((step + 1, self.held_out()?));
        }
        Ok(())
    }

    /// Compares the bytes of one exchange with the plan, if membership changes.
    fn account(&mut self, step: u64, sent: u64, came_about: bool) -> Result<()> {
        if !came_about {
            self.done.failed.push(step);
            self.done.besides += if self.job.is_chaos() { sent } else { 0 };
            return Ok(());
        }
        let (true, Some(planned)) = (self.job.is_chaos(), &mut self.done.planned) else { return Ok(()) };
        let (Some(ranks), Some(rank)) = (self.link.ranks(), self.link.rank()) else { return Ok(()) };
        let expected = self.job.planned(ranks, rank, step..step + 1)?;
        self.done.unplanned += usize::from(sent != expected);
        *planned += expected;
        Ok(())
    }

    /// Runs forward and backward on this worker's batch.
    fn backward(&mut self, step: u64) -> Result<f64> {
        let Job { seed, batch, .. } = *self.job;
        let place = Place { seed, step: step as usize, rank: self.done.worker };
        let batch = self.job.corpus.train_batch_of(self.job.part(self.done.worker), place, batch);
        let micro_batch = self.stepper.micro_batch(batch.rows as u64)?;
        let hand_over = |name: &str, grad: &candle_core::Tensor| {
            with_values(grad, |grad| micro_batch.grad(name, Slice::from(grad)))?.map_err(Into::into)
        };
        let loss = self.gpt.loss_and_grads(&batch, hand_over)?;
        micro_batch.finish()?;
        Ok(f64::from(loss))
    }

    /// Copies the optimizer's parameters into candle's.
    fn refresh(&self) -> Result<()> {
        for Param { name, .. } in &self.job.params {
            self.gpt.weights().set(name, self.stepper.optimizer().param(name)?.typed::<f32>()?)?;
        }
        Ok(())
    }

    /// Returns the mean loss of the worker's parameters on its share of the held-out sequences.
    fn held_out(&self) -> Result<f64> {
        let Job { first, batch, held_out, .. } = *self.job;
        let batches = held_out.div_ceil(first * batch);
        let mut sum = 0.0;
        for i in 0..batches {
            let index = i * first + self.done.worker % first;
            sum +=
                f64::from(self.gpt.loss(&self.job.corpus.held_out_batch(index, batches * first, batch))?);
        }
        Ok(sum / batches as f64)
    }

    fn end(mut self, lost: Option<Loss>) -> Result<Done> {
        let values = |param: &Param| {
            let values = self.stepper.optimizer().param(&param.name)?.typed::<f32>()?;
            Ok((param.name.clone(), values.to_vec()))
        };
        self.done.finals = self.job.params.iter().map(values).collect::<Result<_>>()?;
        self.done.outer = self.stepper.outer()?;
        self.done.lost = lost;
        // Messages that were in flight after the last step are counted now.
        self.done.total = self.link.sent();
        Ok(self.done)
    }
}

impl Stepper {
    fn optimizer(&self) -> &Optimizer {
        match self {
            Stepper::Together(optimizer, _) => optimizer,
            Stepper::Alone(local) => local.optimizer(),
        }
    }

    /// Returns the parameters of the outer optimizers by fragment.
    fn outer(&self) -> Result<Finals> {
        let Stepper::Alone(local) = self else { return Ok(Finals::new()) };
        let mut all = Finals::new();
        for fragment in 0..local.plan().fragments.len() {
            for values in local.outer_params(fragment) {
                all.push((
                    format!("outer parameters of fragment {fragment}"),
                    values.typed::<f32>()?.to_vec(),
                ));
            }
        }
        Ok(all)
    }

    /// Returns the number of steps taken.
    fn steps(&self) -> u64 {
        match self {
            Stepper::Together(_, steps) => *steps,
            Stepper::Alone(local) => local.steps(),
        }
    }

    fn micro_batch(&mut self, weight: u64) -> Result<MicroBatch<'_>> {
        match self {
            Stepper::Together(optimizer, _) => Ok(optimizer.micro_batch(weight)?),
            Stepper::Alone(local) => Ok(local.micro_batch(weight)?),
        }
    }

    /// Takes the step. Returns true if all due exchanges succeeded.
    fn step(&mut self, at: StepArgs) -> Result<bool> {
        let (outcome, came_about) = match self {
            Stepper::Together(optimizer, steps) => {
                let outcome = optimizer.step(at)?.outcome()?;
                *steps += 1;
                (outcome, true)
            }
            Stepper::Alone(local) => {
                let step = local.step(at)?;
                (step.outcome, step.exchanged.failed.is_empty())
            }
        };
        if let Outcome::Skipped { non_finite, .. } = outcome {
            tracing::warn!(non_finite, "a step was skipped, because gradients are not finite");
        }
        Ok(came_about)
    }
}

impl Epoch {
    fn of(round: &Round) -> Self {
        let why = |why: Departure| why.to_string();
        Epoch {
            step: round.step,
            number: round.epoch,
            members: round.members.iter().map(|seat| seat.id).collect(),
            new: round.members.iter().filter(|seat| !seat.counts).map(|seat| seat.id).collect(),
            gone: round.gone.iter().map(|gone| (gone.id, why(gone.why))).collect(),
        }
    }
}

/// Creates the optimizer of a rank of `comm`, with the run's initial values.
pub(super) fn optimizer(job: &Job<'_>, comm: Arc<dyn Communicator>) -> Result<Optimizer> {
    let initial = |param: &meshstep_tensor::Param, mut out: SliceMut<'_>| {
        let values = out.typed_mut::<f32>()?;
        let known = job.params.iter().find(|known| known.name == param.name());
        known.into_iter().for_each(|known| known.fill(job.seed, values));
        Ok(())
    };
    Ok(Optimizer::new(comm, job.layout.clone(), job.method.groups(&job.params), initial, Options::default())?)
}
