//! One rank of a stage: assembles its optimizer and network, and records its steps.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use meshstep_candle::Sharded;
use meshstep_comm::Communicator;
use meshstep_shard::{Accumulate, Options, Outcome, Stage};
use meshstep_tensor::{Category, Meter};
use serde::{Deserialize, Serialize};

use super::checkpoints::Journal;
use super::compare::Finals;
use super::replica::Replica;
use super::trainer::{Course, Taken, Trainer};
use super::{Run, rules};
use crate::gpt::{Gpt, Param};
use crate::ranks::progress::Progress;
use crate::ranks::{Portable, bits};
use crate::report::Peak;

/// Result of one rank; without held-out loss and parameters if the run was asked to end.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Done {
    /// True if the run ended on request.
    pub(super) preempted: bool,
    /// Losses of the run from earlier programs.
    #[serde(with = "bits")]
    pub(super) before: Vec<f64>,
    /// Loss of each step of this program.
    #[serde(with = "bits")]
    pub(super) losses: Vec<f64>,
    /// Held-out loss on this rank's share.
    #[serde(with = "bits")]
    pub(super) held_out: f64,
    /// Number of steps that were skipped because a gradient was not finite.
    pub(super) skipped: usize,
    /// Wall time of all steps.
    pub(super) seconds: f64,
    /// Peak bytes of the rank.
    pub(super) peak: Peak,
    /// Bytes that the rank sent in all steps.
    pub(super) sent: u64,
    /// Final parameters of the rank.
    pub(super) finals: Finals,
}

impl Portable for Done {
    fn values(&mut self) -> Vec<&mut Vec<f32>> {
        self.finals.iter_mut().map(|(_, values)| values).collect()
    }
}

/// Steps of this program, with their checkpoints.
struct Record<'a> {
    steps: Range<usize>,
    journal: Journal<'a>,
    preempted: bool,
    skipped: usize,
    sent: u64,
}

/// Trains on one rank from the first step to the last.
pub(super) fn train(run: &Run, stage: u8, comm: Arc<dyn Communicator>, progress: &Progress) -> Result<Done> {
    let _span = tracing::debug_span!("rank", stage, rank = comm.rank()).entered();
    let (meter, params) = (Meter::new(), run.model.params());
    let network = network(run, &params, comm.rank())?;
    let optimizer = optimizer(run, &network, stage, comm, &meter)?;
    let rates = rules::schedule(run.asked.optimizer, run.asked.steps)?;
    let mut trainer = Trainer { optimizer, network, rates, progress };
    let mut journal = Journal::new(run.checkpoints.as_ref());
    let first = journal.resume(&mut trainer.optimizer, |_, ranks| Ok(mean(ranks)))?;
    progress.resume(first);
    let steps = first..run.asked.last_step();
    let mut record = Record { steps, journal, preempted: false, skipped: 0, sent: 0 };
    let seconds = trainer.train(&mut record)?;
    let Record { journal: Journal { before, losses, .. }, preempted, skipped, sent, .. } = record;
    let peak = peak(&meter);
    let (held_out, finals) = match preempted {
        true => (f64::NAN, Finals::new()),
        false => {
            let finals = trainer.network.finals(trainer.optimizer.optimizer())?;
            (trainer.network.held_out(run.asked.held_out)?, finals)
        }
    };
    Ok(Done { preempted, before, losses, held_out, skipped, seconds, peak, sent, finals })
}

impl Course<Sharded, Replica<'_>> for Record<'_> {
    fn next(&mut self, _: &mut Sharded) -> Result<Option<u64>> {
        Ok(self.steps.next().filter(|_| !self.preempted).map(|step| step as u64))
    }

    fn record(&mut self, taken: Taken, trainer: &mut Trainer<'_, Sharded, Replica<'_>>) -> Result<()> {
        let (Outcome::Applied { traffic, .. } | Outcome::Skipped { traffic, .. }) = taken.outcome;
        self.skipped += usize::from(matches!(taken.outcome, Outcome::Skipped { .. }));
        self.sent += traffic.sent;
        self.journal.losses.push(taken.loss);
        self.preempted = taken.outcome.preempted();
        self.journal.save(taken.step as usize + 1, self.preempted, &mut trainer.optimizer)
    }
}

fn network<'a>(run: &'a Run, params: &'a [Param], rank: usize) -> Result<Replica<'a>> {
    let gpt = Gpt::new(run.model, run.asked.batch)?;
    for param in params {
        let mut values = vec![0.0; param.len()];
        param.fill(run.asked.seed, &mut values);
        gpt.weights().set(&param.name, &values)?;
    }
    Ok(Replica {
        gpt,
        params,
        corpus: &run.corpus,
        part: run.corpus.whole(),
        seed: run.asked.seed,
        rank,
        batch: run.asked.batch,
        ranks: run.asked.ranks(),
        slots: run.slots(),
    })
}

fn optimizer(
    run: &Run,
    network: &Replica<'_>,
    stage: u8,
    comm: Arc<dyn Communicator>,
    meter: &Meter,
) -> Result<Sharded> {
    let options = Options {
        stage: stage_named(stage),
        slots: run.slots().filter(|_| !run.ordinary),
        accumulate: if run.ordinary { Accumulate::Local } else { Accumulate::default() },
        bucket_len: Some(run.bucket),
        meter: meter.clone(),
        preemption: run.preemption.clone(),
        ..Options::default()
    };
    let groups = rules::groups(run.asked.optimizer, network.params);
    Ok(Sharded::new(comm, network.gpt.vars()?, groups, options)?)
}

/// Returns the mean over the ranks for each step.
fn mean(ranks: &[Vec<f64>]) -> Vec<f64> {
    let steps = ranks.iter().map(Vec::len).min().unwrap_or(0);
    (0..steps).map(|t| ranks.iter().map(|rank| rank[t]).sum::<f64>() / ranks.len() as f64).collect()
}

/// Returns the stage with this number.
pub(crate) fn stage_named(stage: u8) -> Stage {
    match stage {
        0 => Stage::Replicated,
        1 => Stage::Zero1,
        2 => Stage::Zero2,
        _ => Stage::Zero3,
    }
}

fn peak(meter: &Meter) -> Peak {
    Peak {
        params: meter.peak(Category::Params),
        grads: meter.peak(Category::Grads),
        buckets: meter.peak(Category::Buckets),
        state: meter.peak(Category::State),
        framework: meter.peak(Category::Framework),
    }
}
