//! One training by one method: its shared data, and the run of its workers.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Result;
use meshstep_comm::{Clock, loopback};
use meshstep_local::{ParamSpec as Params, Ring, Worker};
use meshstep_membership::{Config as Membership, InProcess};
use meshstep_optim::AdamW;
use meshstep_optim::schedule::Schedule as Rates;
use meshstep_shard::{Options, Part, Plan, Sizes};
use meshstep_tensor::Layout;

use super::company::Chaos;
use super::gate::{Gate, Stopped};
use super::link::settings;
use super::method::Method;
use super::schedule::Schedule;
use super::trained::Trained;
use super::tuning::Tuning;
use super::worker::{self, Done, PATIENCE};
use crate::corpus::Corpus;
use crate::gpt::{Config, Param};
use crate::ranks::Ranks;
use crate::ranks::progress::Progress;
use crate::train::replica::layout;
use crate::train::rules::schedule_to;
use crate::train::trainer::cause;

/// Approximate number of held-out losses that are measured during a training.
const MEASURED: u64 = 12;

/// A training that is ready to begin.
#[derive(Debug)]
pub(super) struct Job<'a> {
    pub(super) method: &'a Method,
    pub(super) model: Config,
    pub(super) corpus: &'a Corpus,
    pub(super) params: Vec<Param>,
    pub(super) layout: Layout,
    pub(super) seed: u64,
    pub(super) steps: usize,
    /// Step after which the training ends, at most `steps`.
    pub(super) last: u64,
    /// Sequences per worker and step.
    pub(super) batch: usize,
    /// Number of workers at the start.
    pub(super) first: usize,
    /// Number of sequences for held-out losses, divided among all workers.
    pub(super) held_out: usize,
    pub(super) schedule: Schedule,
    pub(super) tuning: Tuning,
    parts: Vec<Range<usize>>,
    /// Steps between two measurements of the held-out loss; `None`: it is not measured.
    every: Option<u64>,
    marks: &'a [u64],
}

/// Settings that all trainings of a run share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Common<'a> {
    pub(super) model: Config,
    pub(super) corpus: &'a Corpus,
    pub(super) steps: usize,
    pub(super) batch: usize,
    pub(super) workers: usize,
    pub(super) held_out: usize,
    /// Additional steps after which held-out losses are measured.
    pub(super) marks: &'a [u64],
    /// Seed of the trainings that are measured while they run; the others are measured only at the end.
    pub(super) on_the_way: u64,
}

impl<'a> Job<'a> {
    /// Creates the training, and returns its method's warnings. Fails if the plan does not fit the network or the text is
    /// too short.
    pub(super) fn new(
        common: Common<'a>,
        method: &'a Method,
        seed: u64,
        schedule: Schedule,
    ) -> Result<(Self, Vec<String>)> {
        let Common { model, corpus, steps, batch, workers, held_out, marks, on_the_way } = common;
        let params = model.params();
        let all = schedule.workers(workers);
        let layout = layout(&params)?;
        let parts = (0..all).map(|worker| corpus.part(worker, all)).collect::<Result<_>>()?;
        let mut job = Job {
            method,
            model,
            corpus,
            params,
            layout,
            seed,
            steps,
            batch,
            first: workers,
            held_out,
            last: steps as u64,
            schedule,
            tuning: Tuning::default(),
            parts,
            every: None,
            marks,
        };
        job.measure(if seed == on_the_way { MEASURED } else { 1 });
        let trained = Params::of(&job.part_of_one()?, &method.groups(&job.params))?;
        trained.iter().try_for_each(|param| param.rule.check())?;
        let warnings = method.plan.as_ref().map_or(Ok(Vec::new()), |plan| plan.check(&trained))?;
        Ok((job, warnings.iter().map(ToString::to_string).collect()))
    }

    /// Trains on these ranks. Changing workers are threads.
    pub(super) fn train(&self, label: &str, ranks: &Ranks) -> Result<Trained> {
        let done = if self.is_chaos() { self.in_chaos(label)? } else { self.in_peace(label, ranks)? };
        Trained::of(self, done)
    }

    fn in_peace(&self, label: &str, ranks: &Ranks) -> Result<Vec<Done>> {
        let tokens = self.first * self.batch * self.model.context;
        let progress = ranks.progress(label.to_owned(), self.steps, self.first, tokens);
        let ran = ranks.run(self.first, |world| worker::train(self, world, &progress));
        progress.finish();
        all_or_cause(ran?.results)
    }

    fn in_chaos(&self, label: &str) -> Result<Vec<Done>> {
        let all = self.schedule.workers(self.first);
        // One unit of progress is a step of one worker, because the number of workers changes.
        let label = format!("{label}, all workers' steps");
        let progress = Progress::new(label, self.worker_steps(), 1, self.batch * self.model.context);
        let digest = worker::digest(self)?;
        let config =
            Membership { patience: PATIENCE, silence: PATIENCE, ..Membership::new(digest, self.first) };
        let (gate, members) = (Gate::default(), InProcess::new(config, Clock::real())?);
        let chaos = Chaos { gate: &gate, members: &members };
        let done = loopback::spawn_with(settings(all), |thread| {
            worker::train_in_chaos(self, thread.rank(), &chaos, &progress)
        });
        progress.finish();
        all_or_cause(done?)
    }

    /// Returns the bytes that the worker at `rank` of `ranks` sends in these steps if every exchange succeeds.
    pub(super) fn planned(&self, ranks: usize, rank: usize, steps: Range<u64>) -> Result<u64> {
        let Some(plan) = &self.method.plan else { return self.reduced(ranks, rank, steps) };
        let ring = Ring { ranks, rank };
        let worker = Worker { shard: 0, across: ring, world: ring };
        let groups = self.method.groups(&self.params);
        Ok(plan.traffic(&self.part_of_one()?, &groups, worker, steps)?.total())
    }

    /// Returns the bytes that all workers together send if gradients are reduced in every step; `present` has the number of
    /// workers of each step.
    pub(super) fn every_step(&self, present: &[usize]) -> Result<u64> {
        let mut steps = BTreeMap::new();
        present.iter().for_each(|&ranks| *steps.entry(ranks).or_insert(0) += 1);
        let of_all = |(ranks, steps): (usize, u64)| -> Result<u64> {
            (0..ranks).map(|rank| self.reduced(ranks, rank, 0..steps)).sum()
        };
        steps.into_iter().map(of_all).sum()
    }

    fn reduced(&self, ranks: usize, rank: usize, steps: Range<u64>) -> Result<u64> {
        let plan = Plan::new(&self.layout, ranks, &self.tuning.options())?;
        Ok(plan.wire(rank, &AdamW::default()).total() * (steps.end - steps.start))
    }

    /// Returns the learning rates of all steps.
    pub(super) fn rates(&self) -> Result<Rates> {
        match self.tuning.peak {
            Some(peak) => schedule_to(peak, self.steps),
            None => self.method.schedule(self.steps),
        }
    }

    /// Sets the number of times that held-out losses are measured, about; 0 is never.
    pub(super) fn measure(&mut self, times: u64) {
        let period = self.method.period();
        self.every = (times > 0).then(|| period * (self.steps as u64).div_ceil(times * period).max(1));
    }

    /// Returns the worker's part of the text.
    pub(super) fn part(&self, worker: usize) -> Range<usize> {
        self.parts[worker].clone()
    }

    /// Returns the part that the worker with this id reads; ids above the number of workers share parts.
    pub(super) fn seat(&self, worker: u64) -> usize {
        (worker % self.parts.len() as u64) as usize
    }

    pub(super) fn is_chaos(&self) -> bool {
        !self.schedule.events.is_empty()
    }

    /// Returns true if a held-out loss is measured after so many steps.
    pub(super) fn is_measured_after(&self, steps: u64) -> bool {
        let Some(every) = self.every else { return false };
        steps.is_multiple_of(every) || steps == self.steps as u64 || self.marks.contains(&steps)
    }

    /// Returns the part of the parameters that a worker of one rank holds: all of them.
    fn part_of_one(&self) -> Result<Part> {
        Ok(Part::new(self.layout.clone(), Sizes::all(1), [], &Options::default())?)
    }

    /// Returns the approximate number of steps of all workers. New workers start with the next exchange.
    fn worker_steps(&self) -> usize {
        let all = 0..self.schedule.workers(self.first);
        let taken = |worker| {
            let last = self.schedule.lost(worker).map_or(self.steps as u64, |(step, _)| step);
            last.saturating_sub(self.schedule.comes(worker).unwrap_or(0)) as usize
        };
        all.map(taken).sum()
    }
}

/// Returns the results of all workers, or the error that caused the errors of the other workers.
fn all_or_cause(results: Vec<Result<Done>>) -> Result<Vec<Done>> {
    let (mut done, mut errors) = (Vec::new(), Vec::new());
    for (worker, result) in results.into_iter().enumerate() {
        match result {
            Ok(result) => done.push(result),
            Err(error) => errors.push(error.context(format!("worker {worker}"))),
        }
    }
    errors.sort_by_key(is_consequence);
    errors.into_iter().next().map_or(Ok(done), Err)
}

/// A worker that fails leaves the group, so the exchanges of the other workers fail.
fn is_consequence(error: &anyhow::Error) -> bool {
    use meshstep_local::LocalError;
    use meshstep_shard::Error;
    error.is::<Stopped>()
        || matches!(cause(error), Some(Error::Comm(_)))
        || matches!(cause(error), Some(LocalError::Workers { .. } | LocalError::Shard(Error::Comm(_))))
}
