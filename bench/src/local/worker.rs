//! One worker: assembles its optimizer and its copy of the network, follows the membership, and records its steps.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use meshstep_comm::Communicator;
use meshstep_local::{LocalOptimizer, Workers};
use meshstep_membership::{
    Departure, Error as MembershipError, InProcess, InProcessWorker, Membership as _, Round,
};
use meshstep_shard::{Optimizer, Options};
use serde::Serialize;

use super::gate::Gate;
use super::job::Job;
use super::link::{Link, alone};
use super::schedule::Loss;
use crate::gpt::Gpt;
use crate::progress::Progress;
use crate::train::compare::Finals;
use crate::train::replica::{Replica, initial};
use crate::train::trainer::{Course, Network as _, Stepper, Taken, Trainer};

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
pub(super) trait Steps: Stepper {
    /// Returns the number of steps taken.
    fn steps(&self) -> u64;

    /// Prepares an exchange: waits for the other workers, and connects to the current members.
    fn follow(&mut self, connect: &mut dyn FnMut(&Round) -> Result<Workers, MembershipError>) -> Result<()>;

    /// Returns the parameters of the outer optimizers by fragment.
    fn outer(&self) -> Result<Finals>;
}

impl Steps for Optimizer {
    fn steps(&self) -> u64 {
        Optimizer::steps(self)
    }

    /// Nothing to do: the ranks of one optimizer stay.
    fn follow(&mut self, _: &mut dyn FnMut(&Round) -> Result<Workers, MembershipError>) -> Result<()> {
        Ok(())
    }

    fn outer(&self) -> Result<Finals> {
        Ok(Finals::new())
    }
}

impl Steps for LocalOptimizer {
    fn steps(&self) -> u64 {
        LocalOptimizer::steps(self)
    }

    fn follow(&mut self, connect: &mut dyn FnMut(&Round) -> Result<Workers, MembershipError>) -> Result<()> {
        LocalOptimizer::follow(self, connect)?;
        Ok(())
    }

    fn outer(&self) -> Result<Finals> {
        let mut all = Finals::new();
        for fragment in 0..self.plan().fragments.len() {
            for values in self.outer_params(fragment) {
                let name = format!("outer parameters of fragment {fragment}");
                all.push((name, values.typed::<f32>()?.to_vec()));
            }
        }
        Ok(all)
    }
}

/// Shared state of a training with changing workers.
pub(super) struct Chaos<'a> {
    pub(super) gate: &'a Gate,
    pub(super) members: &'a InProcess,
}

/// Steps of one worker, and their records.
struct Record<'a> {
    job: &'a Job<'a>,
    /// With changing workers, the worker's membership and their shared state.
    chaos: Option<(&'a Chaos<'a>, Arc<InProcessWorker>)>,
    link: Link,
    /// Bytes sent when the backward pass ended.
    sent_before: u64,
    done: Done,
}

/// Trains with workers that all stay from the first step to the last.
pub(super) fn train(job: &Job<'_>, world: Arc<dyn Communicator>, progress: &Progress) -> Result<Done> {
    let worker = world.rank();
    match &job.method.plan {
        None => {
            let link = Link::of(Workers { world: Arc::clone(&world), across: Arc::clone(&world) });
            stay(job, worker, optimizer(job, world)?, link, progress)
        }
        Some(plan) => {
            let (inside, workers) = Workers::split(world, worker as u32)?;
            let local = LocalOptimizer::new(optimizer(job, inside)?, workers.clone(), plan.clone())?;
            stay(job, worker, local, Link::of(workers), progress)
        }
    }
}

fn stay<S: Steps>(
    job: &Job<'_>,
    worker: usize,
    optimizer: S,
    link: Link,
    progress: &Progress,
) -> Result<Done> {
    let mut trainer = trainer(job, worker, optimizer, progress)?;
    let mut record = Record::new(job, worker, &trainer, link);
    record.link.begin();
    trainer.train(&mut record)?;
    record.link.settle()?;
    record.done.planned = Some(job.planned(job.first, worker, 0..job.steps as u64)?);
    record.end(&trainer)
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
    let mut trainer = trainer(job, worker, local, progress)?;
    let mut record = Record { chaos: Some((chaos, member)), ..Record::new(job, worker, &trainer, link) };
    (record.done.epochs, record.done.planned) = (epochs, job.method.is_prompt().then_some(0));
    match comes {
        // A joining worker forwards the received state; these bytes are unplanned.
        Some(_) => record.done.besides = record.link.sent(),
        None => record.link.begin(),
    }
    trainer.train(&mut record)?;
    let done = record.end(&trainer)?;
    watch.well();
    Ok(done)
}

fn trainer<'a, S: Stepper>(
    job: &'a Job<'_>,
    worker: usize,
    optimizer: S,
    progress: &'a Progress,
) -> Result<Trainer<'a, S, Replica<'a>>> {
    let network = Replica {
        gpt: Gpt::new(job.model, job.batch)?,
        params: &job.params,
        corpus: job.corpus,
        part: job.part(worker),
        seed: job.seed,
        rank: worker,
        batch: job.batch,
        ranks: job.first,
    };
    network.refresh(optimizer.optimizer())?;
    Ok(Trainer { optimizer, network, rates: job.method.schedule(job.steps)?, progress })
}

impl<S: Steps> Course<S, Replica<'_>> for Record<'_> {
    fn next(&mut self, optimizer: &mut S) -> Result<Option<u64>> {
        let step = optimizer.steps();
        if step >= self.job.steps as u64 {
            return Ok(None);
        }
        let member = self.chaos.as_ref().map(|(_, member)| Arc::clone(member));
        let lost = member.map_or(Ok(None), |member| self.meet(optimizer, step, &member))?;
        self.done.lost = lost;
        Ok(lost.is_none().then_some(step))
    }

    fn before_step(&mut self) {
        self.sent_before = self.link.sent();
    }

    fn record(&mut self, taken: Taken, trainer: &mut Trainer<'_, S, Replica<'_>>) -> Result<()> {
        let sent = self.link.sent();
        self.done.losses.push(taken.loss);
        self.account(taken.step, sent - self.sent_before, taken.exchanged)?;
        self.done.sent.push(sent);
        let steps = taken.step + 1;
        if self.job.is_measured_after(steps) {
            self.done.held_out.push((steps, trainer.network.held_out(self.job.held_out)?));
        }
        Ok(())
    }
}

impl<'a> Record<'a> {
    fn new<S: Steps>(
        job: &'a Job<'a>,
        worker: usize,
        trainer: &Trainer<'_, S, Replica<'_>>,
        link: Link,
    ) -> Self {
        let done = Done { worker, began: trainer.optimizer.steps(), ..Done::default() };
        Record { job, chaos: None, link, sent_before: 0, done }
    }

    /// Waits for the other workers before `step`, if it exchanges. Returns the way in which the worker is lost, if it is lost
    /// now.
    fn meet(
        &mut self,
        optimizer: &mut impl Steps,
        step: u64,
        member: &InProcessWorker,
    ) -> Result<Option<Loss>> {
        let lost = self.job.schedule.lost(self.done.worker);
        let here = lost.filter(|(at, _)| step >= *at).map(|(_, loss)| loss);
        match (here, &self.chaos) {
            (Some(Loss::Leaves), _) => {
                member.leave()?;
                return Ok(here);
            }
            (Some(Loss::Dies), _) => return Ok(here),
            (_, Some((chaos, _))) => {
                // A worker that joins at this step has already waited for the others that join with it.
                let others = self.job.schedule.coming(step).filter(|_| self.done.began < step);
                chaos.gate.reach(step, others, chaos.members)?;
            }
            (_, None) => {}
        }
        let before = self.link.sent();
        let (link, epochs) = (&mut self.link, &mut self.done.epochs);
        optimizer.follow(&mut |round| {
            epochs.push(Epoch::of(round));
            link.connect(member, round)
        })?;
        self.done.besides += self.link.sent() - before;
        Ok(here)
    }

    /// Compares the bytes of one exchange with the plan, if membership changes.
    fn account(&mut self, step: u64, sent: u64, exchanged: bool) -> Result<()> {
        if !exchanged {
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

    fn end<S: Steps>(mut self, trainer: &Trainer<'_, S, Replica<'_>>) -> Result<Done> {
        self.done.finals = trainer.network.finals(trainer.optimizer.optimizer())?;
        self.done.outer = trainer.optimizer.outer()?;
        // Messages that were in flight after the last step are counted now.
        self.done.total = self.link.sent();
        Ok(self.done)
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
    let (groups, initial) = (job.method.groups(&job.params), initial(&job.params, job.seed));
    Ok(Optimizer::new(comm, job.layout.clone(), groups, initial, Options::default())?)
}
