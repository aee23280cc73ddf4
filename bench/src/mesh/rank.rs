//! One rank of a mesh: assembles its optimizer and its part of the network, and records its steps.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail};
use candle_core::Tensor;
use meshstep_candle::hand_over;
use meshstep_candle::parallel::Collectives;
use meshstep_comm::Communicator;
use meshstep_optim::AdamW;
use meshstep_parallel3d::{Axis, Communicators, Coordinate, Mesh, Optimizer, Parameter, Piece, elements};
use meshstep_shard::{Combine, Groups, MicroBatch, Options, Outcome, Stage, Step as _};
use meshstep_tensor::{Meter, SliceMut};
use serde::{Deserialize, Serialize};

use super::network::{Network, Tokens};
use super::pass::Pass;
use super::{Run, trained};
use crate::args::train;
use crate::corpus::Place;
use crate::gpt::{Batch, Weights, loss_and_grads};
use crate::ranks::progress::Progress;
use crate::ranks::{Portable, bits};
use crate::train::checkpoints::Journal;
use crate::train::trainer::{self, Course, Taken, Trainer};
use crate::train::{rules, stage_named};

/// Result of one rank; without parameters if the run was asked to end.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Done {
    /// True if the run ended on request.
    pub(super) preempted: bool,
    /// Losses of the run from earlier programs.
    #[serde(with = "bits")]
    pub(super) before: Vec<f64>,
    /// Sum of the losses of this rank's tokens divided by the number of all tokens, for each step of this program.
    #[serde(with = "bits")]
    pub(super) losses: Vec<f64>,
    /// Norm of the whole gradient in each step.
    #[serde(with = "bits")]
    pub(super) norms: Vec<f64>,
    /// Wall time of all steps.
    pub(super) seconds: f64,
    /// Bytes that the optimizer sent in all steps.
    pub(super) sent: u64,
    /// Bytes that the layers sent in all steps, along tp and along cp.
    pub(super) sent_by_layers: [u64; 2],
    /// Peak bytes of the optimizer.
    pub(super) peak: u64,
    /// Final values of the elements that the rank holds of each parameter.
    pub(super) finals: Vec<Vec<f32>>,
}

impl Portable for Done {
    fn values(&mut self) -> Vec<&mut Vec<f32>> {
        self.finals.iter_mut().collect()
    }
}

/// A rank's part of the network, and the rank's position.
struct Part<'a> {
    run: &'a Run,
    mesh: &'a Mesh,
    at: Coordinate,
    network: Network,
    layers: [Collectives; 2],
    sharded: bool,
}

/// Steps of this program, with their checkpoints.
struct Record<'a> {
    steps: Range<usize>,
    journal: Journal<'a>,
    preempted: bool,
    sent: u64,
    peak: u64,
}

/// Trains on one rank from the first step to the last.
pub(super) fn train(
    run: &Run,
    mesh: &Mesh,
    stage: u8,
    world: Arc<dyn Communicator>,
    progress: &Progress,
) -> Result<Done> {
    let _span = tracing::debug_span!("rank", %mesh, stage, rank = world.rank()).entered();
    let network = Part::new(run, mesh, stage, &world)?;
    let optimizer = optimizer(run, mesh, stage, world)?;
    let rates = rules::schedule(train::Optimizer::Adamw, run.asked.steps)?;
    let mut trainer = Trainer { optimizer, network, rates, progress };
    let mut journal = Journal::new(run.checkpoints.as_ref());
    let first = journal.resume(&mut trainer.optimizer, trained::losses)?;
    progress.resume(first);
    let sent_before = trainer.network.sent_by_layers();
    let steps = first..run.asked.last_step();
    let mut record = Record { steps, journal, preempted: false, sent: 0, peak: 0 };
    let seconds = trainer.train(&mut record)?;
    let after = trainer.network.sent_by_layers();
    let sent_by_layers = [after[0] - sent_before[0], after[1] - sent_before[1]];
    let Record { journal: Journal { before, losses, norms, .. }, preempted, sent, peak, .. } = record;
    let finals = if preempted { Vec::new() } else { trainer.network.finals(&trainer.optimizer)? };
    Ok(Done { preempted, before, losses, norms, seconds, sent, sent_by_layers, peak, finals })
}

impl Course<Optimizer, Part<'_>> for Record<'_> {
    fn next(&mut self, _: &mut Optimizer) -> Result<Option<u64>> {
        Ok(self.steps.next().filter(|_| !self.preempted).map(|step| step as u64))
    }

    fn record(&mut self, taken: Taken, trainer: &mut Trainer<'_, Optimizer, Part<'_>>) -> Result<()> {
        let (norm, traffic) = match taken.outcome {
            Outcome::Applied { norm, traffic, .. } => (norm, traffic),
            Outcome::Skipped { non_finite, .. } => bail!("{non_finite} gradients are not finite"),
        };
        self.journal.losses.push(taken.loss);
        self.journal.norms.push(norm);
        (self.sent, self.peak) = (self.sent + traffic.sent, traffic.peak);
        self.preempted = taken.outcome.preempted();
        self.journal.save(taken.step as usize + 1, self.preempted, &mut trainer.optimizer)
    }
}

impl trainer::Network for Part<'_> {
    fn weight(&self) -> u64 {
        1
    }

    fn backward(&self, step: u64, _: usize, micro_batch: &MicroBatch<'_>) -> Result<f64> {
        let Self { run, network, sharded, .. } = self;
        let tokens = Tokens::new(&self.batch(step as usize), run.tokens())?;
        let mut on_grad = |name: &str, grad: &Tensor| Ok(hand_over(micro_batch, name, grad)?);
        let pass = Pass { units: &run.units, network, tokens, micro_batch, sharded: *sharded };
        Ok(f64::from(loss_and_grads(&pass, &mut on_grad)?))
    }

    fn displayed(&self, loss: f64) -> f64 {
        loss * (self.mesh.degree(Axis::Dp) * self.mesh.degree(Axis::Cp)) as f64
    }
}

impl<'a> Part<'a> {
    fn new(run: &'a Run, mesh: &'a Mesh, stage: u8, world: &Arc<dyn Communicator>) -> Result<Self> {
        let at = mesh.coordinate(world.rank())?;
        let layers = layers(world, mesh)?;
        let local = |p: &Parameter| Ok((p.name.clone(), p.placement.local_shape(&p.name, &p.shape, mesh)?));
        let shapes: Vec<(String, Vec<usize>)> =
            run.model.parameters().iter().map(local).collect::<Result<_>>()?;
        let [tp, cp] = layers.clone();
        let network = Network::new(&run.sizes, Weights::of_shapes(shapes)?, tp, cp)?;
        let sharded = stage_named(stage) == Stage::Zero3;
        Ok(Self { run, mesh, at, network, layers, sharded })
    }

    /// Returns this rank's rows along dp, and of these its tokens along cp.
    fn batch(&self, step: usize) -> Batch {
        let run = self.run;
        let share = |axis: Axis, all: usize| {
            let own = all / self.mesh.degree(axis);
            let at = self.mesh.place(&self.at, axis);
            at * own..(at + 1) * own
        };
        let tokens = share(Axis::Cp, run.sizes.context);
        let rows = share(Axis::Dp, run.rows).map(|row| {
            // Each row is drawn separately, so that a row does not depend on the mesh.
            let place = Place { seed: run.asked.seed, step, rank: row };
            cut(&run.corpus.train_batch(place, 1), tokens.clone())
        });
        rows.fold(Batch { rows: 0, inputs: Vec::new(), targets: Vec::new() }, |mut all, row| {
            all.rows += 1;
            all.inputs.extend(row.inputs);
            all.targets.extend(row.targets);
            all
        })
    }

    fn sent_by_layers(&self) -> [u64; 2] {
        self.layers.each_ref().map(|layers| layers.comm().stats().total().bytes)
    }

    fn finals(&self, optimizer: &Optimizer) -> Result<Vec<Vec<f32>>> {
        let mut finals = Vec::new();
        for unit in &self.run.units {
            let gathered = optimizer.gather(&unit.name)?;
            for param in &unit.params {
                finals.push(gathered.param(&param.name)?.typed::<f32>()?.to_vec());
            }
        }
        Ok(finals)
    }
}

/// Returns the communicators of the layers along tp and along cp, separate from the optimizer's, so that gradients travel
/// concurrently.
fn layers(world: &Arc<dyn Communicator>, mesh: &Mesh) -> Result<[Collectives; 2]> {
    let own = world.split(Some(0), 0)?.unwrap_or_else(|| Arc::clone(world));
    let comms = Communicators::new(own, mesh.clone(), [Axis::Tp.into(), Axis::Cp.into()])?;
    let along = |axis: Axis| Ok::<_, anyhow::Error>(Collectives::new(Arc::clone(comms.along(axis)?)));
    Ok([along(Axis::Tp)?, along(Axis::Cp)?])
}

/// Creates the optimizer. Gradients are sums over tokens, each divided by the number of all tokens, because under cp a
/// token's gradient reaches the keys of other ranks.
fn optimizer(run: &Run, mesh: &Mesh, stage: u8, world: Arc<dyn Communicator>) -> Result<Optimizer> {
    // A larger eps than usual: if a gradient is only rounding error, the step would have the size of lr and a random sign.
    let rule = AdamW { beta2: 0.99, eps: 1e-4, weight_decay: 0.1, ..AdamW::default() };
    let norms = run.params().filter(|param| !param.decays()).map(|param| param.name.as_str());
    let rules = Groups::new(rule.clone()).with(AdamW { weight_decay: 0.0, ..rule }, norms);
    let options = Options {
        stage: stage_named(stage),
        combine: Combine::Sum,
        bucket_len: Some(run.bucket),
        meter: Meter::new(),
        preemption: run.preemption.clone(),
        ..Options::default()
    };
    let initial = |parameter: &Parameter, pieces: &[Piece], mut out: SliceMut<'_>| {
        let values = out.typed_mut::<f32>()?;
        let known = run.params().find(|known| known.name == parameter.name);
        let places = elements(&parameter.shape, pieces);
        known.into_iter().for_each(|known| known.fill_at(run.asked.seed, places.iter().copied(), values));
        Ok(())
    };
    Ok(Optimizer::new(world, mesh.clone(), &run.model, rules, initial, options)?)
}

/// Returns some tokens of a batch of one row.
fn cut(row: &Batch, tokens: Range<usize>) -> Batch {
    Batch { rows: 1, inputs: row.inputs[tokens.clone()].to_vec(), targets: row.targets[tokens].to_vec() }
}
