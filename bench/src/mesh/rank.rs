//! One rank of a mesh: runs its part of each batch through its part of the network, and steps its optimizer.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use candle_core::Tensor;
use meshstep_comm::Communicator;
use meshstep_optim::AdamW;
use meshstep_parallel3d::candle::Collectives;
use meshstep_parallel3d::{Axis, Communicators, Coordinate, Mesh, Optimizer, Parameter, Piece, elements};
use meshstep_shard::{Combine, Groups, Options, Outcome, Stage, StepArgs, Traffic};
use meshstep_tensor::{Meter, Slice, SliceMut};

use super::network::{Network, Tokens};
use super::pass::Pass;
use super::{Run, trained};
use crate::args::train;
use crate::corpus::Place;
use crate::gpt::{Batch, Weights, loss_and_grads, with_values};
use crate::progress::Progress;
use crate::train::checkpoints::Journal;
use crate::train::{MAX_NORM, rules, stage_named};

/// Result of one rank.
#[derive(Debug)]
pub(super) struct Done {
    /// Coordinate of the rank.
    pub(super) at: Coordinate,
    /// Losses of the run from earlier programs.
    pub(super) before: Vec<f64>,
    /// Sum of the losses of this rank's tokens divided by the number of all tokens, for each step of this program.
    pub(super) losses: Vec<f64>,
    /// Norm of the whole gradient in each step.
    pub(super) norms: Vec<f64>,
    /// Wall time of all steps.
    pub(super) seconds: f64,
    /// Bytes that the optimizer sent in all steps.
    pub(super) sent: u64,
    /// Bytes that the layers sent in all steps, along tp and along cp.
    pub(super) sent_by_layers: [u64; 2],
    /// Peak bytes of the optimizer.
    pub(super) peak: u64,
    /// Elements that the rank holds of each parameter, with their final values.
    pub(super) finals: Vec<(Vec<usize>, Vec<f32>)>,
}

/// State of a rank during the training.
struct Rank<'a> {
    run: &'a Run,
    at: Coordinate,
    network: Network,
    layers: [Collectives; 2],
    optimizer: Optimizer,
    sharded: bool,
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
    let mut rank = Rank::new(run, mesh, stage, world)?;
    let schedule = rules::schedule(train::Optimizer::Adamw, run.asked.steps)?;
    let mut journal = Journal::new(run.checkpoints.as_ref());
    let first = journal.resume(&mut rank.optimizer, trained::losses)?;
    progress.resume(first);
    let (mut sent, mut peak) = (0, 0);
    let (sent_before, started) = (rank.sent_by_layers(), Instant::now());
    for step in first..run.asked.last_step() {
        let loss = rank.backward(step)?;
        progress.report(loss * (mesh.degree(Axis::Dp) * mesh.degree(Axis::Cp)) as f64);
        let (norm, traffic) = rank.step(schedule.at(step as u64))?;
        journal.losses.push(loss);
        journal.norms.push(norm);
        (sent, peak) = (sent + traffic.sent, traffic.peak);
        journal.save(step + 1, &mut rank.optimizer)?;
    }
    let seconds = started.elapsed().as_secs_f64();
    let after = rank.sent_by_layers();
    let sent_by_layers = [after[0] - sent_before[0], after[1] - sent_before[1]];
    let finals = rank.finals()?;
    let Journal { before, losses, norms, .. } = journal;
    Ok(Done { at: rank.at, before, losses, norms, seconds, sent, sent_by_layers, peak, finals })
}

impl<'a> Rank<'a> {
    fn new(run: &'a Run, mesh: &Mesh, stage: u8, world: Arc<dyn Communicator>) -> Result<Self> {
        let at = mesh.coordinate(world.rank())?;
        let layers = layers(&world, mesh)?;
        let local = |p: &Parameter| Ok((p.name.clone(), p.placement.local_shape(&p.name, &p.shape, mesh)?));
        let shapes: Vec<(String, Vec<usize>)> =
            run.model.parameters().iter().map(local).collect::<Result<_>>()?;
        let [tp, cp] = layers.clone();
        let network = Network::new(&run.sizes, Weights::of_shapes(shapes)?, tp, cp)?;
        let optimizer = optimizer(run, mesh, stage, world)?;
        let sharded = optimizer.options().stage == Stage::Zero3;
        Ok(Self { run, at, network, layers, optimizer, sharded })
    }

    /// Runs forward and backward on this rank's part of the batch. Gradients are handed over as they are computed, and
    /// reduced meanwhile.
    fn backward(&mut self, step: usize) -> Result<f64> {
        let tokens = Tokens::new(&self.batch(step), self.run.tokens())?;
        let Self { run, network, optimizer, sharded, .. } = self;
        let micro_batch = optimizer.micro_batch(1)?;
        let mut hand_over = |name: &str, grad: &Tensor| {
            with_values(grad, |grad| micro_batch.grad(name, Slice::from(grad)))?.map_err(Into::into)
        };
        let pass = Pass { units: &run.units, network, tokens, micro_batch: &micro_batch, sharded: *sharded };
        let loss = loss_and_grads(&pass, &mut hand_over)?;
        micro_batch.finish()?;
        Ok(f64::from(loss))
    }

    /// Returns this rank's rows along dp, and of these its tokens along cp.
    fn batch(&self, step: usize) -> Batch {
        let run = self.run;
        let share = |axis: Axis, all: usize| {
            let own = all / self.optimizer.mesh().degree(axis);
            let at = self.optimizer.mesh().place(&self.at, axis);
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

    /// Takes the step. Returns the gradient's norm, and the bytes sent.
    fn step(&mut self, lr: f64) -> Result<(f64, Traffic)> {
        let at = StepArgs { lr, max_norm: Some(MAX_NORM), ..StepArgs::default() };
        match self.optimizer.step(at)?.outcome()? {
            Outcome::Applied { norm, traffic, .. } => Ok((norm, traffic)),
            Outcome::Skipped { non_finite, .. } => anyhow::bail!("{non_finite} gradients are not finite"),
        }
    }

    fn sent_by_layers(&self) -> [u64; 2] {
        self.layers.each_ref().map(|layers| layers.comm().stats().total().bytes)
    }

    fn finals(&self) -> Result<Vec<(Vec<usize>, Vec<f32>)>> {
        let mut finals = Vec::new();
        for unit in &self.run.units {
            let gathered = self.optimizer.gather(&unit.name)?;
            for p in unit.params.iter().filter_map(|param| self.run.model.get(&param.name)) {
                let pieces = p.placement.pieces(&p.name, &p.shape, self.optimizer.mesh(), &self.at)?;
                finals.push((elements(&p.shape, &pieces), gathered.param(&p.name)?.typed::<f32>()?.to_vec()));
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
