//! The cost of an exchange of local updates: parameters and both moments of Adam in f32, averaged over 2 workers of one loopback rank
//! each, beside three all-reduces of the same lengths.
//!
//! Steps without an exchange, steps with one and the bare all-reduces take turns. The exchange is the difference of both steps. A
//! line has a median and the interval that holds the true one in 95 of 100 runs.
#![allow(clippy::print_stdout, reason = "a program that measures and prints")]

use meshstep_bench_cases::exchange::{Turns, VECTORS};
use meshstep_bench_cases::samples::Samples;

const WORKERS: usize = 2;
/// Elements of the parameters: the longer ones, with both moments, are more than caches hold.
const LENS: [usize; 2] = [1 << 20, 8 << 20];
const ROUNDS: usize = 25;

fn main() -> anyhow::Result<()> {
    for len in LENS {
        let turns = Turns::measure(WORKERS, len, ROUNDS)?;
        println!("{VECTORS} x {len} elements of f32, {WORKERS} workers, {ROUNDS} rounds");
        print("step, ms", &turns.step.times(1e3));
        print("step with exchange, ms", &turns.exchange.times(1e3));
        print("exchange, ms", &turns.exchange.less(&turns.step).times(1e3));
        print("bare all-reduces, ms", &turns.collectives.times(1e3));
        print("exchange / all-reduces", &turns.over_collectives());
        let [step, with, bare] = [turns.step, turns.exchange, turns.collectives].map(|s| s.median().median);
        println!("{:>24} {:>9.2}", "of the medians", (with - step) / bare);
    }
    Ok(())
}

fn print(what: &str, samples: &Samples) {
    let seen = samples.median();
    println!("{what:>24} {:>9.2}  ({:.2} to {:.2})", seen.median, seen.low, seen.high);
}
