//! What one worker does: its batches through its copy of the network, a step of its own, and what is due between workers.

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

/// How long workers wait for each other: one may be an interval behind, on a machine that has other things to do.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// What a worker brings home.
#[derive(Clone, Debug, Default)]
pub(super) struct Done {
    pub(super) worker: usize,
    /// The step that it began with.
    pub(super) began: u64,
    /// Its loss at every step since.
    pub(super) losses: Vec<f64>,
    /// Bytes that it had sent after each of them.
    pub(super) sent: Vec<u64>,
    /// And in all.
    pub(super) total: u64,
    /// Its part of held-out losses, and after how many steps.
    pub(super) held_out: Vec<(u64, f64)>,
    /// How it ended, where that was before the others.
    pub(super) lost: Option<Loss>,
    /// Whom it was with.
    pub(super) epochs: Vec<Epoch>,
    /// Steps whose exchange did not come about.
    pub(super) failed: Vec<u64>,
    /// Bytes of exchanges that came about, as they were planned; none where that cannot be told one by one.
    pub(super) planned: Option<u64>,
    /// Exchanges whose bytes were others than planned.
    pub(super) unplanned: usize,
    /// Bytes of what no plan foresees: state for those that come, exchanges that failed.
    pub(super) besides: u64,
    /// The parameters it ended with.
    pub(super) finals: Finals,
    /// The outer optimizers' parameters it ended with.
    pub(super) outer: Finals,
}

/// The members from an exchange on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Epoch {
    /// The step of that exchange.
    pub(crate) step: u64,
    pub(crate) number: u64,
    pub(crate) members: Vec<u64>,
    /// Members that have only just come, and count from the next exchange on.
    pub(crate) new: Vec<u64>,
    /// Who is no member any more, and why.
    pub(crate) gone: Vec<(u64, String)>,
}

/// The optimizer, of a worker or of all.
enum Stepper {
    /// Gradients are reduced in every step; so many have been taken.
    Together(Box<Optimizer>, u64),
    Alone(Box<LocalOptimizer>),
}

/// What a worker needs where others come and go.
pub(super) struct Chaos<'a> {
    pub(super) gate: &'a Gate,
    pub(super) members: &'a InProcess,
}

/// A worker in the middle of its work.
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

/// Trains where workers come and go, as one that may be among them.
pub(super) fn train_in_chaos(
    job: &Job<'_>,
    worker: usize,
    chaos: &Chaos<'_>,
    progress: &Progress,
) -> Result<Done> {
    let watch = chaos.gate.watch();
    let comes = job.schedule.comes(worker);
    match comes {
        // In line, so that a worker's rank is not a matter of luck: who is new gets what the first has.
        Some(step) => {
            chaos.gate.wait_for(step)?;
            let before = job.schedule.coming(step).filter(|other| *other < worker);
            chaos.gate.reach(step, before, chaos.members)?;
        }
        None => chaos.gate.reach(0, 0..worker, chaos.members)?,
    }
    let plan = job.method.plan.clone().context("without a plan nobody can come or go")?;
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
        // What it was given, it has sent on.
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

    /// Steps until the end, or until it is lost, and how.
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
                    // Whoever comes here may be this one: it has come with all others of this very step.
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

    /// Where something is exchanged: waits for the others, and learns who they are.
    fn meet(&mut self, member: &InProcessWorker) -> Result<()> {
        let Stepper::Alone(local) = &mut self.stepper else { return Ok(()) };
        let (link, epochs) = (&mut self.link, &mut self.done.epochs);
        local.follow(|round| {
            epochs.push(Epoch::of(round));
            link.connect(member, round)
        })?;
        Ok(())
    }

    /// One step, with what is due, and what is to be told of it.
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

    /// Holds the bytes of one exchange against its plan, where those who exchange change.
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

    /// Forward and backward of this worker's batch.
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

    /// The mean loss of its parameters on its share of the held-out sequences.
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
        // What was on its way after the last step counts now.
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

    /// The parameters of its outer optimizers, by fragment.
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

    /// Steps taken.
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

    /// Takes the step; whether all that was due between workers came about.
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
            tracing::warn!(non_finite, "a step was skipped: gradients are not finite");
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

/// The optimizer of a rank of `comm`, with the run's first values.
pub(super) fn optimizer(job: &Job<'_>, comm: Arc<dyn Communicator>) -> Result<Optimizer> {
    let initial = |param: &meshstep_tensor::Param, mut out: SliceMut<'_>| {
        let values = out.typed_mut::<f32>()?;
        let known = job.params.iter().find(|known| known.name == param.name());
        known.into_iter().for_each(|known| known.fill(job.seed, values));
        Ok(())
    };
    Ok(Optimizer::new(comm, job.layout.clone(), job.method.groups(&job.params), initial, Options::default())?)
}
