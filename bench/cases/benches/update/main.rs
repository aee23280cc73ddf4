//! Compares the speed of every rule with every recipe with memory speed: a loop that only moves the same bytes, in the same
//! run; and exact norms with a plain sum.
//!
//! The machine's speed varies, so the compared contestants take turns in each round, and the median of each counts.
//! `UPDATE_BENCH_LOG2` sets the exponent of the number of parameters (25: 32 Mi), `UPDATE_BENCH_ROUNDS` the rounds,
//! `UPDATE_BENCH_ONLY` a substring of the rows' names.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints its results")]

mod norms;
mod race;

use criterion::Criterion;
use meshstep_bench_cases::update::{Memory, rows};
use meshstep_tensor::Threads;
use race::race;
use std::hint::black_box;

fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn updates(len: usize, rounds: usize) {
    let only = std::env::var("UPDATE_BENCH_ONLY").unwrap_or_default();
    println!("{len} parameters, {} threads, medians of {rounds} rounds", Threads::shared().count());
    println!(
        "{:44} {:>6} {:>8} {:>8} {:>7} {:>7}",
        "rule and recipe", "B/elem", "ms", "GB/s", "of copy", "bar"
    );
    let mut missed = 0;
    for row in rows().into_iter().filter(|row| row.name.contains(&only)) {
        let mut memory = Memory::new(&row, len).unwrap();
        let bytes = memory.bytes();
        let [copy, update] = race(&mut memory, rounds, [&Memory::copy, &|memory| memory.update(&row)]);
        let share = 100.0 * copy / update;
        let verdict = if share < row.bar { " missed" } else { "" };
        missed += usize::from(share < row.bar);
        let speed = (bytes * len) as f64 / update / 1e9;
        let (name, bar, ms) = (row.name, row.bar, update * 1e3);
        println!("{name:44} {bytes:6} {ms:8.2} {speed:8.1} {share:6.1}% {bar:6.0}%{verdict}");
        if let Some(reason) = row.reason {
            println!("    {reason}");
        }
    }
    println!("{missed} of the rows missed their bar");
}

/// Small updates on one thread: the cost per call.
fn small(c: &mut Criterion) {
    let row = rows().swap_remove(0);
    for len in [1 << 10, 32 << 10] {
        let mut memory = Memory::new(&row, len).unwrap();
        c.bench_function(&format!("{} {len}", row.name), |b| b.iter(|| memory.update(black_box(&row))));
    }
}

fn main() {
    // `cargo test --benches` only checks that the program works.
    let trial = !std::env::args().any(|arg| arg == "--bench");
    let log2 = if trial { 12 } else { setting("UPDATE_BENCH_LOG2", 25) };
    let rounds = if trial { 1 } else { setting("UPDATE_BENCH_ROUNDS", 21) };
    updates(1 << log2, rounds);
    norms::races(1 << log2, rounds);
    small(&mut Criterion::default().configure_from_args());
    Criterion::default().configure_from_args().final_summary();
}
