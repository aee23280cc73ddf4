//! One rank: runs its batches through its copy of the network, and steps its optimizer.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result};
use meshstep_comm::Communicator;
use meshstep_shard::{Optimizer, Options, Outcome, Stage, StepArgs};
use meshstep_tensor::{Category, Claim, DType, Layout, Meter, Slice, SliceMut};

use super::checkpoints::Journal;
use super::compare::Finals;
use super::{Run, rules};
use crate::args::train::Train;
use crate::corpus::Place;
use crate::gpt::{Gpt, Param, with_values};
use crate::progress::Progress;
use crate::report::Peak;

/// Norm to which gradients are clipped.
pub(crate) const MAX_NORM: f64 = 1.0;

/// Result of one rank.
#[derive(Debug)]
pub(super) struct Done {
    /// Losses of the run from earlier programs.
    pub(super) before: Vec<f64>,
    /// Loss of each step of this program.
    pub(super) losses: Vec<f64>,
    /// Held-out loss on this rank's share.
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

/// State of a rank during the training.
struct Rank<'a> {
    run: &'a Run,
    index: usize,
    params: Vec<Param>,
    gpt: Gpt,
    optimizer: Optimizer,
    // Counts candle's copy of the parameters while it exists.
    _framework: Claim,
}

/// Trains on one rank from the first step to the last.
pub(super) fn train(run: &Run, stage: u8, comm: Arc<dyn Communicator>, progress: &Progress) -> Result<Done> {
    let _span = tracing::debug_span!("rank", stage, rank = comm.rank()).entered();
    let meter = Meter::new();
    let mut rank = Rank::new(run, stage, comm, &meter)?;
    let schedule = rules::schedule(run.asked.optimizer, run.asked.steps)?;
    let mut journal = Journal::new(run.checkpoints.as_ref());
    let first = journal.resume(&mut rank.optimizer, |_, ranks| Ok(mean(ranks)))?;
    rank.refresh()?;
    progress.resume(first);
    let (mut sent, mut skipped) = (0, 0);
    let started = Instant::now();
    for step in first..run.asked.last_step() {
        let loss = rank.backward(step)?;
        progress.report(loss);
        journal.losses.push(loss);
        let (applied, bytes) = rank.step(schedule.at(step as u64))?;
        skipped += usize::from(!applied);
        sent += bytes;
        journal.save(step + 1, &mut rank.optimizer)?;
    }
    let seconds = started.elapsed().as_secs_f64();
    let (peak, finals) = (peak(&meter), rank.finals()?);
    let Journal { before, losses, .. } = journal;
    Ok(Done { before, losses, held_out: rank.held_out()?, skipped, seconds, peak, sent, finals })
}

impl<'a> Rank<'a> {
    fn new(run: &'a Run, stage: u8, comm: Arc<dyn Communicator>, meter: &Meter) -> Result<Self> {
        let params = run.model.params();
        let gpt = Gpt::new(run.model, run.asked.batch)?;
        let framework = meter.claim(Category::Framework, gpt.weights().bytes() as u64);
        let options = Options {
            stage: stage_named(stage),
            bucket_len: Some(run.bucket),
            meter: meter.clone(),
            ..Options::default()
        };
        let initial = |param: &meshstep_tensor::Param, mut out: SliceMut<'_>| {
            let values = out.typed_mut::<f32>()?;
            let known = params.iter().find(|known| known.name == param.name());
            known.into_iter().for_each(|known| known.fill(run.asked.seed, values));
            Ok(())
        };
        let index = comm.rank();
        let groups = rules::groups(run.asked.optimizer, &params);
        let optimizer = Optimizer::new(comm, layout(&params)?, groups, initial, options)?;
        Ok(Self { run, index, params, gpt, optimizer, _framework: framework })
    }

    /// Runs forward and backward on this rank's batch. Gradients are handed over as they are computed, and reduced
    /// meanwhile.
    fn backward(&mut self, step: usize) -> Result<f64> {
        let Train { seed, batch, .. } = self.run.asked;
        let place = Place { seed, step, rank: self.index };
        let batch = self.run.corpus.train_batch(place, batch);
        let micro_batch = self.optimizer.micro_batch(batch.rows as u64)?;
        let hand_over = |name: &str, grad: &candle_core::Tensor| {
            with_values(grad, |grad| micro_batch.grad(name, Slice::from(grad)))?.map_err(Into::into)
        };
        let loss = self.gpt.loss_and_grads(&batch, hand_over)?;
        micro_batch.finish()?;
        Ok(f64::from(loss))
    }

    /// Takes the step and copies the new values to candle. Returns true if the step was applied, and the bytes sent.
    fn step(&mut self, lr: f64) -> Result<(bool, u64)> {
        let at = StepArgs { lr, max_norm: Some(MAX_NORM), ..StepArgs::default() };
        match self.optimizer.step(at)?.outcome()? {
            Outcome::Applied { traffic, norm, coef } => {
                tracing::debug!(norm, coef, "applied");
                self.refresh()?;
                Ok((true, traffic.sent))
            }
            Outcome::Skipped { traffic, non_finite, .. } => {
                tracing::warn!(non_finite, "a step was skipped, because gradients are not finite");
                Ok((false, traffic.sent))
            }
        }
    }

    /// Copies the optimizer's parameters into candle's.
    fn refresh(&self) -> Result<()> {
        for Param { name, .. } in &self.params {
            self.gpt.weights().set(name, self.optimizer.param(name)?.typed::<f32>()?)?;
        }
        Ok(())
    }

    /// Returns the mean loss on this rank's share of the held-out sequences: at least as many as requested, rounded up to
    /// full batches on every rank.
    fn held_out(&self) -> Result<f64> {
        let Train { ranks, batch, held_out, .. } = self.run.asked;
        let batches = held_out.div_ceil(ranks * batch);
        let mut sum = 0.0;
        for i in 0..batches {
            let index = i * ranks + self.index;
            sum +=
                f64::from(self.gpt.loss(&self.run.corpus.held_out_batch(index, batches * ranks, batch))?);
        }
        Ok(sum / batches as f64)
    }

    fn finals(&self) -> Result<Finals> {
        let values = |param: &Param| {
            let values = self.optimizer.param(&param.name)?.typed::<f32>()?;
            Ok((param.name.clone(), values.to_vec()))
        };
        self.params.iter().map(values).collect()
    }
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

/// Returns the layout of the parameters in f32.
pub(crate) fn layout(params: &[Param]) -> Result<Layout> {
    let add = |builder: meshstep_tensor::LayoutBuilder, param: &Param| {
        builder.param(&param.name, &param.shape, DType::F32)
    };
    params.iter().fold(Layout::builder(), add).build().context("laying out the parameters")
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
