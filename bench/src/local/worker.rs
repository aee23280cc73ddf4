//! One worker: assembles its optimizer and its copy of the network, follows the membership, and records its steps.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use meshstep_candle::Sharded;
use meshstep_comm::Communicator;
use meshstep_local::{LocalError, LocalOptimizer, Workers};
use meshstep_membership::{Departure, Digest, Error as MembershipError, Membership as _, Refusal, Round};
use meshstep_shard::Optimizer;
use serde::{Deserialize, Serialize};

use super::company::{Chaos, Company};
use super::job::Job;
use super::link::Link;
use super::schedule::Loss;
use super::steps::Steps;
use super::stopwatch::Stopwatch;
use crate::gpt::Gpt;
use crate::ranks::progress::Progress;
use crate::ranks::world::alone;
use crate::ranks::{Portable, bits};
use crate::train::compare::Finals;
use crate::train::replica::{Replica, initial};
use crate::train::trainer::{Course, Stepper, Taken, Trainer, cause};

/// Time limit for waiting on other workers; one may be an exchange behind on a busy machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// Number of exchanges in a row that a worker goes without when the arbiter does not answer; then it ends.
const MAX_ALONE: u32 = 8;

/// Result of one worker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Done {
    pub(super) worker: usize,
    /// First step of the worker.
    pub(super) began: u64,
    /// Loss of each step.
    #[serde(with = "bits")]
    pub(super) losses: Vec<f64>,
    /// Bytes sent after each step.
    pub(super) sent: Vec<u64>,
    /// Seconds from the start to the end of each step, without those of held-out losses.
    #[serde(with = "bits")]
    pub(super) seconds: Vec<f64>,
    /// Total bytes sent.
    pub(super) total: u64,
    /// Measured held-out losses on the worker's share, with the number of steps.
    #[serde(with = "bits")]
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

impl Portable for Done {
    fn values(&mut self) -> Vec<&mut Vec<f32>> {
        self.finals.iter_mut().chain(&mut self.outer).map(|(_, values)| values).collect()
    }
}

/// Members from an exchange on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// Steps of one worker, and their records.
struct Record<'a> {
    job: &'a Job<'a>,
    company: Company<'a>,
    /// Exchanges in a row for which the arbiter could not be reached.
    alone: u32,
    link: Link,
    /// Bytes sent when the backward pass ended.
    sent_before: u64,
    clock: Stopwatch,
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
    // All workers start together.
    record.link.settle()?;
    record.link.begin();
    record.clock = Stopwatch::start();
    trainer.train(&mut record)?;
    record.link.settle()?;
    record.done.planned = Some(job.planned(job.first, worker, 0..job.last)?);
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
    let member = Arc::new(chaos.members.join(worker as u64, digest(job)?, PATIENCE)?);
    let company = Company::Scheduled { chaos, member };
    let (mut trainer, mut record) = join(job, worker, company, progress)?;
    trainer.train(&mut record)?;
    let done = record.end(&trainer)?;
    watch.well();
    Ok(done)
}

/// Trains one worker among processes that come and go, and leaves them after the last step. Returns its record, and the error that
/// ended it before.
pub(super) fn train_elastic(
    job: &Job<'_>,
    worker: u64,
    company: Company<'_>,
    progress: &Progress,
) -> Result<(Done, Option<anyhow::Error>)> {
    let (mut trainer, mut record) = join(job, worker as usize, company.clone(), progress)?;
    progress.resume(record.done.began as usize);
    let error = loop {
        match trainer.train(&mut record) {
            Ok(_) => break None,
            // The step was taken, and the decision on its exchange is asked for before the next exchange.
            Err(error) if record.may_go_on_alone(&error) => {
                record.count_unrecorded(trainer.optimizer.steps())
            }
            Err(error) => break Some(error),
        }
    };
    if let (None, Some(member)) = (&error, company.member()) {
        // The training is done, so a lost arbiter is no failure.
        let _ =
            member.leave().inspect_err(|error| tracing::warn!("worker {worker} could not leave: {error}"));
    }
    Ok((record.end(&trainer)?, error))
}

/// Returns the digest with which the workers of a training join.
pub(super) fn digest(job: &Job<'_>) -> Result<Digest> {
    let plan = job.method.plan.as_ref().context("the method has no plan")?;
    Ok(plan.digest(&optimizer(job, alone()?)?))
}

/// Joins the workers that come and go, with the state of the run or at its beginning.
fn join<'a>(
    job: &'a Job<'a>,
    worker: usize,
    company: Company<'a>,
    progress: &'a Progress,
) -> Result<(Trainer<'a, Sharded<LocalOptimizer>, Replica<'a>>, Record<'a>)> {
    let plan = job.method.plan.clone().context("the method has no plan")?;
    let (inner, member) = (optimizer(job, alone()?)?, company.member().context("no membership")?);
    let (mut link, mut epochs, mut counts) = (Link::default(), Vec::new(), true);
    let local = LocalOptimizer::join(inner, plan, member, |round| {
        epochs.push(Epoch::of(round));
        counts = round.counts();
        link.connect(&company, round)
    })?;
    let trainer = trainer(job, worker, local, progress)?;
    let mut record = Record { company, ..Record::new(job, worker, &trainer, link) };
    (record.done.epochs, record.done.planned) = (epochs, job.method.is_prompt().then_some(0));
    match counts {
        true => record.link.begin(),
        // A joining worker forwards the received state; these bytes are unplanned.
        false => record.done.besides = record.link.sent(),
    }
    Ok((trainer, record))
}

fn trainer<'a, S: Stepper>(
    job: &'a Job<'_>,
    worker: usize,
    optimizer: S,
    progress: &'a Progress,
) -> Result<Trainer<'a, Sharded<S>, Replica<'a>>> {
    let network = Replica {
        gpt: Gpt::new(job.model, job.batch)?,
        params: &job.params,
        corpus: job.corpus,
        part: job.part(job.seat(worker as u64)),
        seed: job.seed,
        rank: worker,
        batch: job.batch,
        ranks: job.first,
        slots: None,
    };
    let optimizer = Sharded::over(optimizer, network.gpt.vars()?)?;
    Ok(Trainer { optimizer, network, rates: job.rates()?, progress })
}

impl<S: Steps> Course<S, Replica<'_>> for Record<'_> {
    fn next(&mut self, optimizer: &mut S) -> Result<Option<u64>> {
        let step = optimizer.steps();
        if step >= self.job.last {
            return Ok(None);
        }
        let lost = if self.company.changes() { self.meet(optimizer, step)? } else { None };
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
        self.done.seconds.push(self.clock.seconds());
        let steps = taken.step + 1;
        if self.job.is_measured_after(steps) {
            let loss = self.clock.pause(|| trainer.network.held_out(self.job.held_out))?;
            self.done.held_out.push((steps, loss));
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
        Record {
            job,
            company: Company::Fixed,
            alone: 0,
            link,
            sent_before: 0,
            clock: Stopwatch::start(),
            done,
        }
    }

    /// Waits for the other workers before `step`, if it exchanges. Returns the way in which the worker is lost, if it is lost
    /// now.
    fn meet(&mut self, optimizer: &mut impl Steps, step: u64) -> Result<Option<Loss>> {
        let lost = self.job.schedule.lost(self.done.worker).filter(|_| self.job.is_chaos());
        let here = lost.filter(|(at, _)| step >= *at).map(|(_, loss)| loss);
        if let Company::Scheduled { chaos, member } = &self.company {
            match here {
                Some(Loss::Leaves) => {
                    member.leave()?;
                    return Ok(here);
                }
                Some(Loss::Dies) => return Ok(here),
                Some(Loss::DiesWithin) | None => {}
            }
            // A worker that joins at this step has already waited for the others that join with it.
            let others = self.job.schedule.coming(step).filter(|_| self.done.began < step);
            chaos.gate.reach(step, others, chaos.members)?;
        }
        let before = self.link.sent();
        let (link, epochs, company) = (&mut self.link, &mut self.done.epochs, &self.company);
        let followed = optimizer.follow(&mut |round| {
            epochs.push(Epoch::of(round));
            link.connect(company, round)
        });
        self.done.besides += self.link.sent() - before;
        match followed {
            Ok(()) => self.alone = 0,
            // The step is taken without an exchange.
            Err(error) if self.may_go_on_alone(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(here)
    }

    /// Counts an error of a worker among processes. Returns true if it says that the arbiter did not answer, or has too few
    /// workers, and this one may go on without an exchange.
    fn may_go_on_alone(&mut self, error: &anyhow::Error) -> bool {
        let Some(LocalError::Membership(error)) = cause(error) else { return false };
        let unanswered = matches!(
            error,
            MembershipError::Unanswered { .. } | MembershipError::Refused(Refusal::TooFew { .. })
        );
        let may = unanswered && matches!(self.company, Company::Elastic { .. }) && self.alone < MAX_ALONE;
        if may {
            self.alone += 1;
            tracing::warn!("exchange {} of at most {MAX_ALONE} is left out: {error}", self.alone);
        }
        may
    }

    /// Fills the record of steps that were taken, but ended with an error.
    fn count_unrecorded(&mut self, steps: u64) {
        let taken = (steps - self.done.began) as usize;
        self.done.losses.resize(taken.max(self.done.losses.len()), f64::NAN);
        self.done.sent.resize(taken.max(self.done.sent.len()), self.link.sent());
    }

    /// Compares the bytes of one exchange with the plan, if membership changes.
    fn account(&mut self, step: u64, sent: u64, exchanged: bool) -> Result<()> {
        if !exchanged {
            self.done.failed.push(step);
            self.done.besides += if self.company.changes() { sent } else { 0 };
            return Ok(());
        }
        let (true, Some(planned)) = (self.company.changes(), &mut self.done.planned) else { return Ok(()) };
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
    Ok(Optimizer::new(comm, job.layout.clone(), groups, initial, job.tuning.options())?)
}
