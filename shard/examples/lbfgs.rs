//! Fits a logistic regression with sharded L-BFGS: `cargo run -p meshstep-shard --example lbfgs`.
//!
//! Four ranks hold a quarter of the rows each. Every evaluation sums their losses and gradients; each rank keeps the history of its own
//! shard of the weights. The result is compared with one rank's that holds all rows.

#![allow(clippy::print_stdout)] // a program

use meshstep_optim::{Lbfgs, LineSearch};
use meshstep_shard::Minimized;
use meshstep_shard::prelude::*;
use std::error::Error;
use std::fmt::Write;
use std::sync::Arc;

const ROWS: usize = 2000;
const FEATURES: usize = 32;
/// Factor of the penalty `decay / 2 |w|^2`, which makes the minimum unique.
const DECAY: f64 = 1.0;

/// A row of the table, and its class, -1 or 1.
fn row(i: usize) -> (Vec<f64>, f64) {
    let number = |j: usize| ((i * FEATURES + j) as f64 * 0.618_033_988_749_894_9).fract() - 0.5;
    // Features of different sizes: a hard case for plain gradient descent.
    let x: Vec<f64> = (0..FEATURES).map(|j| number(j) * (1.0 + j as f64)).collect();
    let score: f64 = x.iter().enumerate().map(|(j, x)| x * if j % 3 == 0 { 1.0 } else { -0.5 }).sum();
    (x, if score + 20.0 * number(FEATURES + 7 * i) > 0.0 { 1.0 } else { -1.0 })
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
        tolerance_grad: 1e-8,
        tolerance_change: 0.0,
        ..Lbfgs::default()
    };
    let meter = Meter::new();
    let options =
        Options { combine: Combine::Sum, stage: Stage::Zero2, meter: meter.clone(), ..Options::default() };
    let mut opt = ShardedLbfgs::new(comm, layout, rule, |_, _| Ok(()), options)?; // starts at zero
    let run = opt.minimize(|mb| {
        let w = mb.param("weights")?.typed::<f64>()?;
        // Each rank counts its share of the penalty.
        let share = DECAY / ranks as f64;
        let mut grad: Vec<f64> = w.iter().map(|w| share * w).collect();
        let penalty = share / 2.0 * w.iter().map(|w| w * w).sum::<f64>();
        let loss: f64 = rows.iter().map(|row| logistic(w, row, &mut grad)).sum();
        mb.grad("weights", &grad[..])?;
        Ok::<_, meshstep_shard::Error>(penalty + loss)
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
            writeln!(text, "loss {:.1} to {:.4} by {:?}", run.history[0].loss, run.loss, run.stop)?;
            writeln!(text, "gradient norm below 1e-6: {}", run.grad_norm < 1e-6)?;
            writeln!(text, "few iterations: {}", run.iterations < 100)?;
        }
        let apart = weights.iter().zip(&alone.weights).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        writeln!(
            text,
            "rank {rank} holds {history} of {} bytes of state; weights equal one rank's within 1e-7: {}",
            alone.history,
            apart < 1e-7
        )?;
    }
    Ok(text)
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    print!("{}", run()?);
    Ok(())
}
