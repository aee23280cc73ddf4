//! Steps per second of `Sharded` on one rank beside burn's AdamW, in turns in one process:
//! `cargo run --release -p meshstep-burn --example burn_speed`.
//!
//! Both train eight vectors by the sum of their squares. A step is forward, backward and update; its figure is the median of the turns.

#![allow(clippy::print_stdout)] // a program

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};
use burn_optim::{AdamWConfig, GradientsParams};
use meshstep_burn::Sharded;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_shard::{Options, StepArgs};
use std::sync::Arc;
use std::time::{Duration, Instant};

type Failed = Box<dyn std::error::Error + Send + Sync>;

const VECTORS: usize = 8;
/// Small enough that values stay far from zero in all steps: arithmetic on subnormal numbers is slow.
const LR: f64 = 1e-7;

#[derive(Module, Debug)]
struct Vectors {
    all: Vec<Param<Tensor<1>>>,
}

impl Vectors {
    /// Returns eight vectors of `len` elements together.
    fn new(len: usize) -> Self {
        let vector = |i: usize| {
            let values: Vec<f32> = (0..len / VECTORS).map(|j| ((i + j) as f32 * 0.37).sin()).collect();
            let data = TensorData::new(values, [len / VECTORS]);
            Param::from_tensor(Tensor::from_data(data, &Device::flex().autodiff()).require_grad())
        };
        Vectors { all: (0..VECTORS).map(vector).collect() }
    }

    fn loss(&self) -> Tensor<1> {
        Tensor::cat(self.all.iter().map(|v| v.val().square().sum()).collect(), 0).sum()
    }
}

/// Takes steps for the duration of a turn, and returns the steps per second.
fn turn(lasts: Duration, mut step: impl FnMut() -> Result<(), Failed>) -> Result<f64, Failed> {
    let (start, mut steps) = (Instant::now(), 0);
    while steps == 0 || start.elapsed() < lasts {
        step()?;
        steps += 1;
    }
    Ok(f64::from(steps) / start.elapsed().as_secs_f64())
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Returns the median steps per second of burn's optimizer and of ours.
fn compare(
    comm: Arc<dyn Communicator>,
    len: usize,
    (turns, lasts): (usize, Duration),
) -> Result<[f64; 2], Failed> {
    let (mut theirs, mut ours) = (Some(Vectors::new(len)), Vectors::new(len));
    let mut burn = AdamWConfig::new().init();
    let rule = AdamW { eps: 1e-5, weight_decay: 1e-4, ..AdamW::default() }; // burn's defaults
    let mut sharded = Sharded::new(comm, &mut ours, rule, Options::default())?;
    let (mut slow, mut fast) = (Vec::new(), Vec::new());
    for _ in 0..turns {
        slow.push(turn(lasts, || {
            let model = theirs.take().ok_or("the model is between two steps")?;
            let grads = GradientsParams::from_grads(model.loss().backward(), &model);
            theirs = Some(burn.step(LR, model, grads));
            Ok(())
        })?);
        let at = StepArgs { lr: LR, ..StepArgs::default() };
        fast.push(turn(lasts, || {
            let loss = ours.loss();
            Ok(sharded.backward_step(&mut ours, loss, at).map(drop)?)
        })?);
    }
    Ok([median(slow), median(fast)])
}

/// Prints a line for each length; with an argument, of short vectors in short turns.
fn main() -> Result<(), Failed> {
    let brief = std::env::args().nth(1).is_some();
    let lens: &[usize] = if brief { &[800] } else { &[3_000, 300_000, 4_000_000, 16_000_000] };
    let turns = if brief { (1, Duration::from_millis(1)) } else { (7, Duration::from_secs(1)) };
    println!("steps per second\nparameters  burn-optim  meshstep-burn  ratio");
    for &len in lens {
        let [theirs, ours] = loopback::spawn(1, |comm| compare(comm, len, turns))?.remove(0)?;
        println!("{len:>10}  {theirs:>10.1}  {ours:>13.1}  {:>5.2}", ours / theirs);
    }
    Ok(())
}
