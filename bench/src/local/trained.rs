//! Result of a training, collected from its workers.

use std::collections::BTreeSet;
use std::ops::Range;

use anyhow::Result;
use serde::Serialize;

use super::job::Job;
use super::schedule::{Loss, Schedule};
use super::worker::{Done, Epoch};
use crate::args::local::Task;
use crate::train::compare::{Finals, digest, first_difference};

/// Results of one training by one method.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Trained {
    pub(crate) method: Task,
    /// Description of the rule and the periods.
    pub(crate) about: String,
    pub(crate) seed: u64,
    pub(crate) steps: usize,
    /// Mean loss in each step over the workers that took the step.
    pub(crate) losses: Vec<f64>,
    /// Total bytes sent by all workers after each step.
    pub(crate) sent: Vec<u64>,
    /// Bytes that the busiest worker has sent after each step.
    pub(crate) sent_most: Vec<u64>,
    /// Seconds of a step, the mean over the steps of the slowest worker, without measurements of held-out losses.
    pub(crate) seconds_per_step: f64,
    /// Held-out losses: the number of steps, and the mean over the workers.
    pub(crate) held_out: Vec<(u64, f64)>,
    /// Planned bytes of all successful exchanges; `None` if results are delayed while workers join and leave.
    pub(crate) planned: Option<u64>,
    /// Number of workers that took each step.
    pub(crate) present: Vec<usize>,
    /// Bytes that the same workers send if gradients are reduced in each step.
    pub(crate) every_step: u64,
    /// Unplanned bytes: state for joining workers, and failed exchanges.
    pub(crate) besides: u64,
    /// Number of times that a worker's bytes differ from the plan.
    pub(crate) unplanned: usize,
    /// True if all parameters were exchanged after the last step.
    pub(crate) compared: bool,
    /// True if workers have outer optimizers; their parameters must be equal on all workers.
    pub(crate) outer: bool,
    /// Number of workers with parameters that differ from the first worker's: their own parameters if `compared`, and the
    /// outer optimizers'.
    pub(crate) differing: usize,
    /// Description of a difference.
    pub(crate) difference: Option<String>,
    /// Digest of the final parameters of all workers and of their outer optimizers, names and bits.
    pub(crate) digest: String,
    pub(crate) workers: Vec<Life>,
    /// Members by epoch; empty if all workers stay.
    pub(crate) epochs: Vec<Epoch>,
    /// Steps with a failed exchange.
    pub(crate) failed: Vec<u64>,
    /// Planned events.
    pub(crate) schedule: Schedule,
}

/// One worker of a training.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Life {
    /// Byte range of the training text that the worker read.
    pub(crate) part: Range<usize>,
    /// Share of letters in this range.
    pub(crate) letters: f64,
    /// Steps that the worker took.
    pub(crate) steps: Range<u64>,
    /// Way in which the worker was lost; `None` if it trained to the end.
    pub(crate) lost: Option<Loss>,
    pub(crate) sent: u64,
    /// Planned bytes, as in [`Trained`].
    pub(crate) planned: Option<u64>,
}

impl Trained {
    pub(super) fn of(job: &Job<'_>, done: Vec<Done>) -> Result<Self> {
        let steps = 0..job.steps as u64;
        let mut epochs: Vec<Epoch> = done.iter().flat_map(|done| done.epochs.clone()).collect();
        epochs.sort_by_key(|epoch| epoch.number);
        epochs.dedup();
        let mut failed: Vec<u64> = done.iter().flat_map(|done| done.failed.clone()).collect();
        failed.sort_unstable();
        failed.dedup();
        let stayed = || done.iter().filter(|done| done.lost.is_none());
        // After a failed exchange workers keep their own parameters.
        let compared =
            job.method.alike_after(steps.end) && failed.last().is_none_or(|step| step + 1 < steps.end);
        let present: Vec<usize> =
            steps.clone().map(|step| done.iter().filter(|done| done.loss(step).is_some()).count()).collect();
        let own = if compared { differences(stayed(), |done| &done.finals) } else { Vec::new() };
        let mut differing = differences(stayed(), |done| &done.outer);
        differing.extend(own);
        let difference = differing.last().map(|(_, difference)| difference.clone());
        let differing: BTreeSet<usize> = differing.into_iter().map(|(worker, _)| worker).collect();
        Ok(Trained {
            method: job.method.task,
            about: job.method.describe(),
            seed: job.seed,
            steps: job.steps,
            losses: steps.clone().map(|step| mean(done.iter().filter_map(|done| done.loss(step)))).collect(),
            sent: steps.clone().map(|step| done.iter().map(|done| done.sent_after(step)).sum()).collect(),
            sent_most: busiest(steps.clone(), &done),
            seconds_per_step: done.iter().map(Done::seconds_per_step).fold(0.0, f64::max),
            held_out: held_out(&done),
            planned: done.iter().map(|done| done.planned).sum(),
            every_step: job.every_step(&present)?,
            present,
            besides: done.iter().map(|done| done.besides).sum(),
            unplanned: done.iter().map(|done| done.unplanned + usize::from(!done.adds_up())).sum(),
            compared,
            outer: done.iter().any(|done| !done.outer.is_empty()),
            differing: differing.len(),
            difference,
            digest: digest(done.iter().flat_map(|done| [&done.finals, &done.outer])),
            workers: done.iter().map(|done| Life::of(job, done)).collect(),
            epochs,
            failed,
            schedule: job.schedule.clone(),
        })
    }

    /// Returns the held-out loss after so many steps; NaN if none was measured.
    pub(crate) fn held_out_after(&self, steps: u64) -> f64 {
        self.held_out.iter().find(|(at, _)| *at == steps).map_or(f64::NAN, |(_, loss)| *loss)
    }

    /// Returns the held-out loss after the last step.
    pub(crate) fn held_out(&self) -> f64 {
        self.held_out.last().map_or(f64::NAN, |(_, loss)| *loss)
    }

    /// Returns the bytes sent by all workers.
    pub(crate) fn sent(&self) -> u64 {
        self.workers.iter().map(|worker| worker.sent).sum()
    }
}

impl Life {
    fn of(job: &Job<'_>, done: &Done) -> Self {
        let (part, steps) = (job.part(done.worker), done.began..done.began + done.losses.len() as u64);
        let letters = job.corpus.letters(part.clone());
        Life { part, letters, steps, lost: done.lost, sent: done.total, planned: done.planned }
    }
}

impl Done {
    fn loss(&self, step: u64) -> Option<f64> {
        self.losses.get(usize::try_from(step.checked_sub(self.began)?).ok()?).copied()
    }

    /// Returns the mean seconds of the worker's steps; 0 without steps.
    fn seconds_per_step(&self) -> f64 {
        self.seconds.last().map_or(0.0, |seconds| seconds / self.seconds.len() as f64)
    }

    /// Returns the bytes that the worker had sent after `step`.
    fn sent_after(&self, step: u64) -> u64 {
        let Some(index) = step.checked_sub(self.began) else { return 0 };
        self.sent.get(index as usize).copied().unwrap_or(self.total)
    }

    /// Returns true if the bytes sent are the planned bytes plus the extra bytes.
    fn adds_up(&self) -> bool {
        self.planned.is_none_or(|planned| planned + self.besides == self.total)
    }
}

/// Returns, after each step, the sum of the most bytes that one worker sent in each step until then.
fn busiest(steps: Range<u64>, done: &[Done]) -> Vec<u64> {
    let in_step = |done: &Done, step: u64| {
        let before = step.checked_sub(1).map_or(0, |before| done.sent_after(before));
        done.sent_after(step).saturating_sub(before)
    };
    let most = |step| done.iter().map(|done| in_step(done, step)).max().unwrap_or(0);
    let so_far = |sum: &mut u64, step| {
        *sum += most(step);
        Some(*sum)
    };
    steps.scan(0, so_far).collect()
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    sum / f64::from(count)
}

/// Returns each measured loss as the mean over the workers that measured it.
fn held_out(done: &[Done]) -> Vec<(u64, f64)> {
    let mut steps: Vec<u64> =
        done.iter().flat_map(|done| done.held_out.iter().map(|(step, _)| *step)).collect();
    steps.sort_unstable();
    steps.dedup();
    let at = |step| done.iter().flat_map(move |done| &done.held_out).filter(move |(at, _)| *at == step);
    steps.into_iter().map(|step| (step, mean(at(step).map(|(_, loss)| *loss)))).collect()
}

/// Returns the workers with values that differ from the first worker's, with a description of the difference.
fn differences<'a>(
    mut done: impl Iterator<Item = &'a Done>,
    values: impl Fn(&'a Done) -> &'a Finals,
) -> Vec<(usize, String)> {
    let name = |done: &Done| format!("worker {}", done.worker);
    let Some(first) = done.next() else { return Vec::new() };
    let differs = |other: &'a Done| {
        let difference = first_difference((&name(first), values(first)), (&name(other), values(other)));
        difference.map(|difference| (other.worker, difference))
    };
    done.filter_map(differs).collect()
}
