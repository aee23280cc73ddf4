//! Fits a logistic regression with sharded L-BFGS: `cargo run -p meshstep-shard --example lbfgs`.
//!
//! Four ranks hold a quarter of the rows each. Every evaluation sums their losses and gradients; each rank keeps the history of its own
//! shard of the weights. The result is compared with that of one rank, which holds all rows.

#![allow(clippy::print_stdout)] // a program

use meshstep_optim::{Lbfgs, LineSearch};
use meshstep_shard::Minimized;
use meshstep_shard::prelude::*;
use std::error::Error;
use std::fmt::Write;
use std::sync::Arc;

const ROWS: usize = 400;
const FEATURES: usize = 256;
/// Factor of the penalty `decay / 2 |w|^2`, which makes the minimum unique.
const DECAY: f64 = 0.01;

/// A row of the table, and its class, -1 or 1.
fn row(i: usize) -> (Vec<f64>, f64) {
    let number = |j: usize| (((i * 1000 + j) as f64 * 12.9898).sin() * 43_758.545_3).fract();
    let x: Vec<f64> = (0..FEATURES).map(number).collect();
    let score: f64 = x.iter().enumerate().map(|(j, x)| x * if j % 3 == 0 { 1.0 } else { -0.5 }).sum();
    (x, if score + 3.0 * number(FEATURES) > 0.0 { 1.0 } else { -1.0 })
}

/// Adds the gradient of `ln(1 + exp(-y w.x))` to `grad`, and returns the loss.
fn logistic(w: &[f64], (x, y): &(Vec<f64>, f64), grad: &mut [f64]) -> f64 {
    let margin = y * w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
    let chance = 1.0 / (1.0 + margin.exp());
    grad.iter_mut().zip(x).for_each(|(g, x)| *g -= y * chance * x);
    // The second form does not overflow where the margin is very negative.
    if margin > 0.0 { (-margin).exp().ln_1p() } else { margin.exp().ln_1p() - margin }
}

/// Result of one rank: the run, the weights, and the bytes of history that this rank holds.
struct Fit {
    run: Minimized,
    weights: Vec<f64>,
    history: u64,
}

/// Fits on one rank, which holds every `world_size`-th row.
fn fit(comm: Arc<dyn Communicator>) -> Result<Fit, meshstep_shard::Error> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let rows: Vec<_> = (rank..ROWS).step_by(ranks).map(row).collect();
    let layout = Layout::builder().param("weights", &[FEATURES], DType::F64).build()?;
    let rule = Lbfgs {
        line_search: LineSearch::StrongWolfe,
        history_len: 10,
        max_iter: 200,
        tolerance_grad: 1e-7,
        tolerance_change: 0.0,
        ..Lbfgs::default()
    };
    let meter = Meter::new();
    // Losses and gradients of the ranks are averaged.
    let options = Options { stage: Stage::Zero2, meter: meter.clone(), ..Options::default() };
    let mut opt = ShardedLbfgs::new(comm, layout, rule, |_, _| Ok(()), options)?; // starts at zero
    let run = opt.minimize(|mb| {
        let w = mb.param("weights")?.typed::<f64>()?;
        let mut grad = vec![0.0; FEATURES];
        let loss: f64 = rows.iter().map(|row| logistic(w, row, &mut grad)).sum();
        let penalty = DECAY / 2.0 * w.iter().map(|w| w * w).sum::<f64>();
        let mean = 1.0 / rows.len() as f64;
        grad.iter_mut().zip(w).for_each(|(g, w)| *g = mean * *g + DECAY * w);
        mb.grad("weights", &grad[..])?;
        Ok::<_, meshstep_shard::Error>(mean * loss + penalty)
    })?;
    let weights = opt.optimizer().param("weights")?.typed::<f64>()?.to_vec();
    Ok(Fit { run, weights, history: meter.live(Category::State) })
}

pub(crate) fn run() -> Result<String, Box<dyn Error + Send + Sync>> {
    let alone = loopback::spawn(1, fit)?.remove(0)?;
    let mut text = String::new();
    for (rank, fit) in loopback::spawn(4, fit)?.into_iter().enumerate() {
        let Fit { run, weights, history } = fit?;
        if rank == 0 {
            let (first, Minimized { loss, iterations, stop, .. }) = (run.history[0].loss, run);
            writeln!(text, "loss {first:.3} to {loss:.3} in {iterations} iterations, ended by {stop:?}")?;
        }
        let apart = weights.iter().zip(&alone.weights).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        writeln!(
            text,
            "rank {rank} holds {history} of {} bytes of state; weights within 1e-4 of one rank's: {}",
            alone.history,
            apart < 1e-4
        )?;
    }
    Ok(text)
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    print!("{}", run()?);
    Ok(())
}
