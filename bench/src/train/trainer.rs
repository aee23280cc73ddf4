//! The trainer of every run: one rank of a stage or of a mesh, or one worker.

use std::error::Error;
use std::ops::Range;
use std::time::Instant;

use anyhow::Result;
use meshstep_local::LocalStep;
use meshstep_optim::schedule::Schedule;
use meshstep_shard::{MicroBatch, Outcome, Pending, Step, StepArgs};

use crate::ranks::progress::Progress;

/// Norm to which gradients are clipped.
const MAX_NORM: f64 = 1.0;

/// An optimizer or a wrapper of one, which takes the steps of a training.
pub(crate) trait Stepper: Step<Outcome: Settled, Error: Error + Send + Sync + 'static> {}

impl<S: Step<Outcome: Settled, Error: Error + Send + Sync + 'static>> Stepper for S {}

/// Result of a step that can be waited for.
pub(crate) trait Settled {
    /// Returns the step's outcome, and true if every exchange between workers succeeded.
    fn settled(self) -> Result<(Outcome, bool)>;
}

impl Settled for Pending {
    fn settled(self) -> Result<(Outcome, bool)> {
        Ok((self.outcome()?, true))
    }
}

impl Settled for LocalStep {
    fn settled(self) -> Result<(Outcome, bool)> {
        Ok((self.outcome, self.exchanged.failed.is_empty()))
    }
}

/// Returns the optimizer's error of this type, also inside an error of candle's variables.
pub(crate) fn cause<E: Error + Send + Sync + 'static>(error: &anyhow::Error) -> Option<&E> {
    error.downcast_ref().or_else(|| match error.downcast_ref()? {
        meshstep_candle::Error::Shard(error) => (error as &dyn Error).downcast_ref(),
        meshstep_candle::Error::Wrapper(error) => error.downcast_ref(),
        _ => None,
    })
}

/// A rank's part of the network, with the data that it trains on.
pub(crate) trait Network {
    /// Returns the weight of each micro-batch.
    fn weight(&self) -> u64;

    /// Runs forward and backward on the micro-batch `batch` of `step`, and returns its loss. Gradients are handed over as they are computed,
    /// and reduced meanwhile.
    fn backward(&self, step: u64, batch: usize, micro_batch: &MicroBatch<'_>) -> Result<f64>;

    /// Returns the micro-batches that this rank computes in a step, among those of all ranks.
    fn batches(&self) -> Range<usize> {
        0..1
    }

    /// Returns the loss to display: the mean of all ranks' displayed losses is the loss of the step.
    fn displayed(&self, loss: f64) -> f64 {
        loss
    }
}

/// The steps of one run, and their records.
pub(crate) trait Course<S, N> {
    /// Returns the step to take next, from 0; `None` ends the training.
    fn next(&mut self, optimizer: &mut S) -> Result<Option<u64>>;

    /// Called between the backward pass and the step.
    fn before_step(&mut self) {}

    /// Records a step.
    fn record(&mut self, taken: Taken, trainer: &mut Trainer<'_, S, N>) -> Result<()>;
}

/// One step's results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// The step, from 0.
    pub(crate) step: u64,
    pub(crate) loss: f64,
    pub(crate) outcome: Outcome,
    /// True if every exchange between workers succeeded.
    pub(crate) exchanged: bool,
}

/// One rank of a training.
#[derive(Debug)]
pub(crate) struct Trainer<'a, S, N> {
    pub(crate) optimizer: S,
    pub(crate) network: N,
    pub(crate) rates: Schedule,
    pub(crate) progress: &'a Progress,
}

impl<S: Stepper, N: Network> Trainer<'_, S, N> {
    /// Takes all steps of a course, and returns their wall time in seconds.
    pub(crate) fn train(&mut self, course: &mut impl Course<S, N>) -> Result<f64> {
        let started = Instant::now();
        while let Some(step) = course.next(&mut self.optimizer)? {
            let loss = self.backward(step)?;
            course.before_step();
            let taken = self.step(step, loss)?;
            course.record(taken, self)?;
        }
        Ok(started.elapsed().as_secs_f64())
    }

    fn backward(&mut self, step: u64) -> Result<f64> {
        let (batches, weight, mut sum) = (self.network.batches(), self.network.weight(), 0.0);
        for batch in batches.clone() {
            let micro_batch = match batch + 1 == batches.end {
                true => self.optimizer.micro_batch(weight)?,
                false => self.optimizer.accumulate(weight)?,
            };
            sum += self.network.backward(step, batch, &micro_batch)?;
            micro_batch.finish()?;
        }
        let loss = sum / batches.len() as f64;
        self.progress.report(self.network.displayed(loss));
        Ok(loss)
    }

    fn step(&mut self, step: u64, loss: f64) -> Result<Taken> {
        let at = StepArgs { lr: self.rates.at(step), max_norm: Some(MAX_NORM), ..StepArgs::default() };
        let (outcome, exchanged) = self.optimizer.step(at)?.settled()?;
        match outcome {
            Outcome::Applied { norm, coef, .. } => tracing::debug!(norm, coef, "applied"),
            Outcome::Skipped { non_finite, .. } => {
                tracing::warn!(non_finite, "a step was skipped, because gradients are not finite");
            }
        }
        Ok(Taken { step, loss, outcome, exchanged })
    }
}
