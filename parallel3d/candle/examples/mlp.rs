//! Trains an MLP with ZeRO-2 on four threads: `cargo run -p meshstep-candle --example mlp`. Started by `meshstep launch`, torchrun
//! or srun, each process is one rank: `meshstep launch -n 2 -- target/debug/examples/mlp`.
//!
//! Each rank reads a part of every batch of 32 samples; the result is compared with training on whole batches on one rank.

#![allow(clippy::print_stdout)] // a program

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, VarMap};
use meshstep_candle::{NamedVars as _, Sharded, Tape};
use meshstep_comm::rendezvous::Environment;
use meshstep_comm::{Communicator, loopback, tcp};
use meshstep_optim::AdamW;
use meshstep_shard::{Options, Stage, StepArgs};
use std::error::Error;
use std::fmt::Write as _;
use std::sync::Arc;

type Failed = Box<dyn Error + Send + Sync>;

const BATCH: usize = 32;
const STEPS: usize = 100;

/// Network 2 -> 32 -> 1.
struct Mlp {
    hidden: Linear,
    out: Linear,
}

impl Mlp {
    fn new(vars: VarBuilder<'_>) -> Result<Self> {
        let hidden = candle_nn::linear(2, 32, vars.pp("hidden"))?;
        Ok(Mlp { hidden, out: candle_nn::linear(32, 1, vars.pp("out"))? })
    }

    /// Mean squared error. The graph is cut after the hidden layer: gradients of `out` travel while those of `hidden` are computed.
    fn loss(&self, (x, y): &(Tensor, Tensor), tape: &mut Tape) -> Result<Tensor> {
        let hidden = tape.cut(&self.hidden.forward(x)?.tanh()?)?;
        (self.out.forward(&hidden)? - y)?.sqr()?.mean_all()
    }
}

/// Returns one rank's samples of a batch: points, and the product of their coordinates.
fn samples(step: usize, comm: &dyn Communicator) -> Result<(Tensor, Tensor)> {
    let part = BATCH / comm.world_size();
    let first = step * BATCH + comm.rank() * part;
    let point = |i: usize| [(i as f32 * 0.618).fract() * 2.0 - 1.0, (i as f32 * 0.414).fract() * 2.0 - 1.0];
    let points: Vec<f32> = (first..first + part).flat_map(point).collect();
    let x = Tensor::from_vec(points, (part, 2), &Device::Cpu)?;
    let y = (x.narrow(1, 0, 1)? * x.narrow(1, 1, 1)?)?;
    Ok((x, y))
}

/// Gives the variables the same values in every process; without this, rank 0's are broadcast.
fn seed(map: &VarMap) -> Result<()> {
    for (name, var) in map.named_vars() {
        let salt = name.len() as f32;
        let value = |i: usize| (i as f32 * 0.75 + salt).sin() * 0.7;
        var.set(&Tensor::from_iter((0..var.elem_count()).map(value), &Device::Cpu)?.reshape(var.shape())?)?;
    }
    Ok(())
}

/// Losses of one rank, and its final parameters.
type Trained = (Vec<f32>, Vec<f32>);

/// Trains on one rank.
fn train(comm: Arc<dyn Communicator>, stage: Stage) -> std::result::Result<Trained, Failed> {
    let (map, world) = (VarMap::new(), Arc::clone(&comm));
    let mlp = Mlp::new(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
    seed(&map)?;
    let mut opt = Sharded::new(comm, &map, AdamW::default(), Options { stage, ..Options::default() })?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let mut tape = Tape::new();
        let loss = mlp.loss(&samples(step, &*world)?, &mut tape)?;
        losses.push(loss.to_scalar::<f32>()?);
        opt.backward_step_cut(
            tape,
            &loss,
            StepArgs { lr: 0.02, max_norm: Some(1.0), ..StepArgs::default() },
        )?;
    }
    let mut finals = Vec::new();
    for (_, var) in opt.vars() {
        finals.extend(var.flatten_all()?.to_vec1::<f32>()?);
    }
    Ok((losses, finals))
}

/// Trains on the ranks of this program: the one that a launcher started, or four threads.
fn on_ranks() -> std::result::Result<Vec<Trained>, Failed> {
    if ["RANK", "SLURM_STEP_ID"].iter().any(|name| std::env::var_os(name).is_some()) {
        let world = tcp::join(&Environment::from_env()?, &tcp::Options::default())?;
        return Ok(vec![train(world.communicator(), Stage::Zero2)?]);
    }
    loopback::spawn(4, |comm| train(comm, Stage::Zero2))?.into_iter().collect()
}

pub(crate) fn run() -> std::result::Result<String, Failed> {
    let alone = loopback::spawn(1, |comm| train(comm, Stage::Replicated))?.remove(0)?;
    let mut text = String::new();
    for (losses, finals) in on_ranks()? {
        let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
        let (first, last) = (mean(&losses[..10]), mean(&losses[STEPS - 10..]));
        let apart = finals.iter().zip(&alone.1).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        writeln!(
            text,
            "loss {first:.4} to {last:.4}; within 1e-3 of one rank's parameters: {}",
            apart < 1e-3
        )?;
    }
    Ok(text)
}

fn main() -> std::result::Result<(), Failed> {
    print!("{}", run()?);
    Ok(())
}
