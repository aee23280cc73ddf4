//! Steps per second of `Sharded` on one rank beside candle's AdamW, in turns in one process:
//! `cargo run --release -p meshstep-candle --example candle_speed`.
//!
//! Both train eight vectors by the sum of their squares. A step is forward, backward and update; its figure is the median of the turns.

#![allow(clippy::print_stdout)] // a program

use candle_core::{Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use meshstep_candle::Sharded;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_shard::{Options, StepArgs};
use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Failed = Box<dyn std::error::Error + Send + Sync>;

const VECTORS: usize = 8;
/// Small enough that values stay far from zero in all steps: arithmetic on subnormal numbers is slow.
const LR: f64 = 1e-7;

/// Lengths to compare, the number of turns of each, and their duration.
pub(crate) struct Race<'a> {
    pub(crate) lens: &'a [usize],
    pub(crate) turns: usize,
    pub(crate) turn: Duration,
}

/// Returns eight vectors of `len` elements together.
fn vectors(len: usize) -> Result<Vec<(String, Var)>, Failed> {
    let vector = |i: usize| {
        let values = (0..len / VECTORS).map(|j| ((i + j) as f32 * 0.37).sin());
        Ok((format!("v{i}"), Var::from_tensor(&Tensor::from_iter(values, &Device::Cpu)?)?))
    };
    (0..VECTORS).map(vector).collect()
}

fn loss(vectors: &[(String, Var)]) -> candle_core::Result<Tensor> {
    let squares = vectors.iter().map(|(_, v)| v.sqr()?.sum_all()).collect::<Result<Vec<_>, _>>()?;
    Tensor::stack(&squares, 0)?.sum_all()
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

/// Returns the median steps per second of candle's optimizer and of ours.
fn compare(comm: Arc<dyn Communicator>, len: usize, race: &Race<'_>) -> Result<[f64; 2], Failed> {
    let (theirs, ours) = (vectors(len)?, vectors(len)?);
    let config = ParamsAdamW { lr: LR, ..ParamsAdamW::default() };
    let vars = theirs.iter().map(|(_, var)| var.clone()).collect();
    let mut candle = candle_nn::AdamW::new(vars, config)?;
    let mut sharded = Sharded::new(comm, &ours[..], AdamW::default(), Options::default())?;
    let (mut slow, mut fast) = (Vec::new(), Vec::new());
    for _ in 0..race.turns {
        slow.push(turn(race.turn, || Ok(candle.backward_step(&loss(&theirs)?)?))?);
        let at = StepArgs { lr: LR, ..StepArgs::default() };
        fast.push(turn(race.turn, || Ok(sharded.backward_step(&loss(&ours)?, at).map(drop)?))?);
    }
    Ok([median(slow), median(fast)])
}

/// Returns a line for each length.
pub(crate) fn run(race: &Race<'_>) -> Result<String, Failed> {
    let mut text = "parameters  candle-nn  meshstep-candle  ratio\n".to_owned();
    for &len in race.lens {
        let [theirs, ours] = loopback::spawn(1, |comm| compare(comm, len, race))?.remove(0)?;
        writeln!(text, "{len:>10}  {theirs:>9.1}  {ours:>15.1}  {:>5.2}", ours / theirs)?;
    }
    Ok(text)
}

fn main() -> Result<(), Failed> {
    let lens = [3_000, 300_000, 4_000_000, 16_000_000];
    print!("steps per second\n{}", run(&Race { lens: &lens, turns: 7, turn: Duration::from_secs(1) })?);
    Ok(())
}
