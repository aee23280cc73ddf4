//! DES-LOC with workers that come and go, as threads: `cargo run -p meshstep-local --example workers`.
//!
//! Three workers train one linear model, each on its own samples. They average parameters every 4 steps, first moments every 8 and
//! second moments every 16. Worker 2 leaves after step 16; worker 3 joins before the exchange of step 32.

#![allow(clippy::print_stdout)] // a program

use meshstep_comm::{Clock, loopback};
use meshstep_local::{LocalOptimizer, LocalPlan, Workers};
use meshstep_membership::{Config, Error as MembershipError, InProcess, Membership, Round};
use meshstep_shard::prelude::*;
use std::cell::RefCell;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

type Failed = Box<dyn Error + Send + Sync>;
type Worked = Result<(String, Vec<f32>), Failed>;

const FEATURES: usize = 64;
const STEPS: u64 = 64;
/// Samples of a step.
const BATCH: u64 = 8;
const LONG: Duration = Duration::from_secs(60);

/// Mean squared error on a worker's samples of a step, and its gradient.
fn loss(worker: u64, step: u64, w: &[f32]) -> (f32, Vec<f32>) {
    let (mut loss, mut grad) = (0.0, vec![0.0; FEATURES]);
    for sample in (0..BATCH).map(|i| (worker * 1000 + step) * BATCH + i) {
        let seed = |j: usize| (sample * FEATURES as u64 + j as u64) as f64 * 12.9898;
        let x: Vec<f32> = (0..FEATURES).map(|j| (seed(j).sin() * 43_758.545_3).fract() as f32).collect();
        // The model to find has weights 0.5 and -0.5 in turns.
        let target = |j: usize| if j.is_multiple_of(2) { 0.5 } else { -0.5 };
        let error: f32 = x.iter().zip(w).enumerate().map(|(j, (x, w))| x * (w - target(j))).sum();
        loss += error * error / BATCH as f32;
        grad.iter_mut().zip(&x).for_each(|(g, x)| *g += 2.0 * error * x / BATCH as f32);
    }
    (loss, grad)
}

/// One worker, here of one rank; `loopback::spawn(4, ..)` would divide its state among four.
fn optimizer() -> Result<Optimizer, Failed> {
    let comm = loopback::world(loopback::Config::new(1))?.remove(0);
    let layout = Layout::builder().param("w", &[FEATURES], DType::F32).build()?;
    Ok(Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), Options::default())?)
}

/// Returns once `is` is true.
fn soon(is: impl Fn() -> bool) -> Result<(), Failed> {
    let begin = Instant::now();
    while !is() {
        (begin.elapsed() < LONG).then_some(()).ok_or("another worker has not come within a minute")?;
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Trains worker `id` until it leaves, or the run ends; returns a line about it, and its parameters.
fn work(id: u64, run: &InProcess, plan: &LocalPlan, at_28: &AtomicBool) -> Worked {
    let inner = optimizer()?;
    if id == 3 {
        soon(|| at_28.load(SeqCst))?;
    }
    let member = Arc::new(run.join(id, plan.digest(&inner), LONG)?);
    let worlds: RefCell<Vec<Arc<dyn Communicator>>> = RefCell::default();
    // Called once for each set of members; the worlds are kept for their counts of bytes.
    let connect = |round: &Round| -> Result<Workers, MembershipError> {
        let world = member.communicator(round, LONG)?;
        worlds.borrow_mut().push(Arc::clone(&world));
        Ok(Workers { across: Arc::clone(&world), world })
    };
    let mut local = LocalOptimizer::join(inner, plan.clone(), Arc::clone(&member) as _, connect)?;
    let (first, mut losses) = (local.steps(), Vec::new());
    while local.steps() < if id == 2 { 16 } else { STEPS } {
        if local.steps() == 28 && id != 3 {
            // The example always takes the same course; a worker may join at any time.
            at_28.store(true, SeqCst);
            soon(|| run.waiting().contains(&3))?;
        }
        local.follow(connect)?; // waits for the members if the step exchanges
        let (loss, grad) = loss(id, local.steps(), local.param("w")?.typed::<f32>()?);
        losses.push(loss);
        let mb = local.micro_batch(1)?;
        mb.grad("w", &grad[..])?;
        mb.finish()?;
        let exchanged = local.step(StepArgs { lr: 0.05, ..StepArgs::default() })?.exchanged;
        let failed = exchanged.failed.first().map(|(_, veto)| format!("an exchange failed: {veto:?}"));
        failed.map_or(Ok(()), Err)?;
    }
    member.leave()?;
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    let (begun, ended) = (mean(&losses[..8]), mean(&losses[losses.len() - 8..]));
    let sent: u64 = worlds.borrow().iter().map(|world| world.stats().total().bytes).sum();
    // A gradient of f32, 2 (n - 1) / n of which each of n = 3 workers would send in every step.
    let every_step = losses.len() * FEATURES * 4 * 4 / 3;
    let line = format!("steps {first} to {}, loss {begun:.2} to {ended:.3}", local.steps());
    let line = format!("worker {id}: {line}, sent {sent} bytes, by an all-reduce a step {every_step}\n");
    Ok((line, local.param("w")?.typed::<f32>()?.to_vec()))
}

pub(crate) fn run() -> Result<String, Failed> {
    let (plan, at_28) = (LocalPlan::des_loc(4, 8, 16), AtomicBool::new(false));
    let run = InProcess::new(Config::new(plan.digest(&optimizer()?), 3), Clock::real())?;
    let work = &|id| work(id, &run, &plan, &at_28);
    let ends: Vec<_> = std::thread::scope(|scope| {
        let threads = [0, 1, 2, 3].map(|id| scope.spawn(move || work(id)));
        threads.map(|thread| thread.join().unwrap_or_else(|_| Err("a worker panicked".into()))).into()
    });
    let ends = ends.into_iter().collect::<Result<Vec<_>, _>>()?;
    let same = [1, 3].iter().all(|&id| ends[id].1 == ends[0].1);
    let lines: String = ends.into_iter().map(|(line, _)| line).collect();
    Ok(lines + &format!("workers 0, 1 and 3 end with the same parameters: {same}\n"))
}

fn main() -> Result<(), Failed> {
    print!("{}", run()?);
    Ok(())
}
