//! Updates, collectives and whole steps of 4, 8 and 16 loopback ranks, each compared with a copy of the bytes that it must
//! move; with `--torch PYTHON PEERS.PY` also in turns with PyTorch and gloo.
//!
//! Prints a line for each case, and keeps `cpu-bench.json` (`cpu-torch.json`) in $OUT up to date after every case. A failed
//! case is a row with its error: the remaining cases still run, and the final exit status is a failure.
//!
//! `CPU_BENCH_RANKS` sets the numbers of ranks (4,8,16), `CPU_BENCH_LOG2` the exponent of the elements of an update (26); a
//! step has a quarter of them. `CPU_BENCH_ROUNDS` sets the rounds (11), `GPU_BENCH_SECONDS` the time budget (none),
//! `GPU_BENCH_ONLY` a substring of the cases' names. Without `--bench`, `--measure` or `--torch` sizes are small, for a
//! trial run.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

mod rows;
mod settings;
mod torch;

use anyhow::{Result, bail};
use meshstep_bench_cases::budget::Budget;
use meshstep_bench_cases::machine::Machine;
use meshstep_bench_cases::record::{Outcome, Record};
use serde_json::{Value, json};
use settings::Settings;
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let settings = Settings::read()?;
    let Some([python, script]) = &settings.torch else {
        let mut rows = rows::rows(&settings);
        rows.retain(|row| settings.wants(&row.name));
        return all(&settings, &rows, rows::Row::head, |row| row.measure(settings.rounds));
    };
    if !torch::is_there(python) {
        println!("skipped: {} has no torch", python.display());
        return Ok(());
    }
    let mut rows = torch::rows(&settings);
    rows.retain(|row| settings.wants(&row.name));
    let mut started = None;
    all(&settings, &rows, torch::Row::head, |row| {
        row.measure(&mut started, [python, script], settings.rounds)
    })
}

/// Measures the rows in turn and records each result.
fn all<R>(
    settings: &Settings,
    rows: &[R],
    head: impl Fn(&R) -> Value,
    mut measure: impl FnMut(&R) -> Result<Value>,
) -> Result<()> {
    let about = json!({
        "machine": Machine::here(),
        "unix_seconds": SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
        "ranks": settings.ranks,
        "reference": "a copy of as many bytes as must be moved, in turns with the case",
    });
    println!("{}", Machine::here());
    let mut record = Record::new(settings.path.clone(), &about, rows.iter().map(head).collect())?;
    let mut budget = Budget::new(settings.seconds);
    for (idx, row) in rows.iter().enumerate() {
        let begun = Instant::now();
        let outcome = match budget.over() {
            Some(reason) => Outcome::NotRun(reason),
            None => Outcome::of(|| measure(row)),
        };
        budget.took(begun.elapsed());
        print(record.set(idx, outcome)?);
    }
    match record.errors() {
        0 => Ok(()),
        errors => bail!("{errors} of {} cases failed", rows.len()),
    }
}

fn print(row: &Value) {
    let name = row["name"].as_str().unwrap_or_default();
    let number = |key: &str| row[key].as_f64();
    if let (Some(ms), Some(reference)) = (number("ms"), number("reference_ms")) {
        let theirs =
            number("torch_over_ours").map_or_else(String::new, |ratio| format!("  torch {ratio:6.2}x"));
        println!("{name:62} {ms:10.3} ms  reference {reference:10.3} ms{theirs}");
    }
    for (key, said) in [("error", "error"), ("not_run", "not run")] {
        if let Some(reason) = row[key].as_str() {
            println!("{name:62} {said}: {reason}");
        }
    }
}
