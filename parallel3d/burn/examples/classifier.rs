//! Trains a burn classifier with ZeRO-2 on four threads: `cargo run -p meshstep-burn --example classifier`. Started by
//! `cargo xtask launch`, torchrun or srun, each process is one rank:
//! `cargo xtask launch -n 2 --program target/debug/examples/classifier`.
//!
//! Each rank reads a part of every batch of 64 points; the result is compared with training on whole batches on one rank.

#![allow(clippy::print_stdout)] // a program

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_nn::loss::CrossEntropyLossConfig;
use burn_nn::{Linear, LinearConfig};
use meshstep_burn::Sharded;
use meshstep_comm::rendezvous::Environment;
use meshstep_comm::{Communicator, loopback, tcp};
use meshstep_optim::AdamW;
use meshstep_shard::{Options, Stage, StepArgs};
use std::error::Error;
use std::sync::Arc;

type Failed = Box<dyn Error + Send + Sync>;

const BATCH: usize = 64;
const STEPS: usize = 150;

/// Network 2 -> 32 -> 3: the class of a point is its ring around the origin.
#[derive(Module, Debug)]
struct Classifier {
    hidden: Linear,
    out: Linear,
}

impl Classifier {
    fn new(device: &Device) -> Self {
        let (hidden, out) = (LinearConfig::new(2, 32).init(device), LinearConfig::new(32, 3).init(device));
        Classifier { hidden, out }.map(&mut Seed) // without this, rank 0's random values are broadcast
    }

    fn forward(&self, points: Tensor<2>) -> Tensor<2> {
        self.out.forward(self.hidden.forward(points).tanh())
    }
}

/// Gives parameters the same values in every process, so that runs can be compared.
struct Seed;

impl ModuleMapper for Seed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.lazy_shape();
        let values: Vec<f32> =
            (0..shape.num_elements()).map(|i| (i as f32 * 0.75 + 1.0).sin() * 0.7).collect();
        param.map(|old| Tensor::from_data(TensorData::new(values, shape), &old.device()).require_grad())
    }
}

/// Returns one rank's samples of a batch: points, and their classes.
fn samples(step: usize, comm: &dyn Communicator, device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
    let part = BATCH / comm.world_size();
    let first = step * BATCH + comm.rank() * part;
    let point = |i: usize| [(i as f32 * 0.618).fract() * 4.0 - 2.0, (i as f32 * 0.414).fract() * 4.0 - 2.0];
    let points: Vec<[f32; 2]> = (first..first + part).map(point).collect();
    let classes: Vec<i32> = points.iter().map(|[x, y]| (x.hypot(*y) as i32).min(2)).collect();
    let points = TensorData::new(points.concat(), [part, 2]);
    (Tensor::from_data(points, device), Tensor::from_data(TensorData::new(classes, [part]), device))
}

/// Losses of one rank, and its final parameters.
type Trained = (Vec<f32>, Vec<f32>);

/// Trains on one rank.
fn train(comm: Arc<dyn Communicator>, stage: Stage) -> Result<Trained, Failed> {
    let (device, world) = (Device::flex().autodiff(), Arc::clone(&comm));
    let mut model = Classifier::new(&device);
    let mut opt = Sharded::new(comm, &mut model, AdamW::default(), Options { stage, ..Options::default() })?;
    let (cross_entropy, mut losses) = (CrossEntropyLossConfig::new().init(&device), Vec::new());
    for step in 0..STEPS {
        let (points, classes) = samples(step, &*world, &device);
        let loss = cross_entropy.forward(model.forward(points), classes);
        losses.push(loss.clone().into_scalar());
        let at = StepArgs { lr: 0.03, max_norm: Some(1.0), ..StepArgs::default() };
        opt.backward_step(&mut model, loss, at)?;
    }
    let weights = [model.hidden.weight.val(), model.out.weight.val()];
    let finals = weights.map(|weight| weight.into_data().try_into_vec::<f32>());
    Ok((losses, finals.into_iter().collect::<Result<Vec<_>, _>>()?.concat()))
}

/// Trains on the ranks of this program: the one that a launcher started, or four threads.
fn on_ranks() -> Result<Vec<Trained>, Failed> {
    if ["RANK", "SLURM_STEP_ID"].iter().any(|name| std::env::var_os(name).is_some()) {
        let world = tcp::join(&Environment::from_env()?, &tcp::Options::default())?;
        return Ok(vec![train(world.communicator(), Stage::Zero2)?]);
    }
    loopback::spawn(4, |comm| train(comm, Stage::Zero2))?.into_iter().collect()
}

/// Prints a line for each rank of this process.
fn main() -> Result<(), Failed> {
    let alone = loopback::spawn(1, |comm| train(comm, Stage::Replicated))?.remove(0)?;
    for (losses, finals) in on_ranks()? {
        let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
        let (first, last) = (mean(&losses[..10]), mean(&losses[STEPS - 10..]));
        let apart = finals.iter().zip(&alone.1).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        println!("loss {first:.4} to {last:.4}; at most {apart:.1e} from one rank's weights");
        assert!(last < 0.5 * first, "the loss stays at {last}");
        assert!(apart < 1e-3, "sharded training ends {apart} from one rank's");
    }
    Ok(())
}
