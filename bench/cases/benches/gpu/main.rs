//! Compares the speed of every step on a GPU with memory speed: the device's own memory copy in the same run.
//!
//! The first step of each case is compared with the CPU, bit for bit. Then copy and case take turns, timed by the device's
//! clock, and the median of each counts. Prints tables, and keeps `gpu-bench.json` in $OUT, or the file given as argument,
//! up to date after every case. A failed case is a row with its error: the remaining cases still run, and the final exit
//! status is a failure. `--smoke` runs only the first case, with 2^16 parameters, and writes `smoke.json`.
//!
//! `GPU_BENCH_LOG2` sets the exponent of the largest number of parameters (30), `GPU_BENCH_ROUNDS` the rounds (51),
//! `GPU_BENCH_SECONDS` the time budget (none), `GPU_BENCH_ONLY` a substring of the cases' names, `GPU_BENCH_CASE` a whole
//! name. With `GPU_BENCH_STANDIN=1` the program also runs on the stand-in for a driver, to test the program; it marks the
//! results accordingly.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

mod report;
mod settings;

use meshstep_bench_cases::budget::Budget;
use meshstep_bench_cases::gpu::{
    Copy, Measured, Result, Row, SMOKE, figures, fitting, launch, machine, rows, smoke,
};
use meshstep_bench_cases::record::{Outcome, Record};
use meshstep_optim::cuda::{LoadedKernel, loaded_kernels};
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::{Device, Stream};
use serde_json::{Value, json};
use settings::Settings;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let settings = Settings::read()?;
    let driver = match machine::driver()? {
        Ok(driver) => driver,
        Err(missing) => {
            println!("skipped: {missing}");
            return Ok(());
        }
    };
    let device = Device::open(0)?;
    let queue = Queue::cuda(Stream::new(&device)?);
    let len = if settings.smoke { SMOKE } else { fitting(settings.log2, &queue)? };
    let mut rows = if settings.smoke { smoke() } else { rows(len, settings.rounds) };
    rows.retain(|row| settings.wants(&row.name));
    let rounds = rows.iter().map(|row| row.rounds).max().unwrap_or(settings.rounds);
    let about = report::about(&device, driver, len, rounds)?;
    report::print_head(&about);
    let mut record = Record::new(settings.path.clone(), &about, rows.iter().map(Row::head).collect())?;
    match launch(&queue) {
        Ok(launch) => {
            println!(
                "a launch: {:.1} us to enqueue, {:.1} us until it is done",
                launch.ask, launch.ask_and_wait
            );
            record.about("launch_us", json!({ "ask": launch.ask, "ask_and_wait": launch.ask_and_wait }))?;
        }
        Err(error) => record.about("launch_us", json!({ "error": error.to_string() }))?,
    }
    all(&rows, &settings, len, &mut record, &queue)?;
    record.about("after", machine::clocks())?;
    record.about("kernels", kernels(&device)?)?;
    report::print_roofline(record.rows());
    println!(
        "{}",
        settings
            .path
            .map_or("no file was written, because OUT is not set".into(), |path| path.display().to_string())
    );
    match record.errors() {
        0 => Ok(()),
        errors => Err(format!("{errors} of {} cases failed", rows.len()).into()),
    }
}

/// Returns the loaded kernels, with their load times and the driver's report on each.
fn kernels(device: &Device) -> Result<Value> {
    let told = |LoadedKernel { name, took, footprint }: LoadedKernel| {
        json!({
            "name": name,
            "load_ms": took.as_secs_f64() * 1e3,
            "registers": footprint.registers,
            "local_bytes": footprint.local,
            "shared_bytes": footprint.shared,
            "blocks_per_multiprocessor": footprint.blocks,
        })
    };
    Ok(loaded_kernels(device)?.into_iter().map(told).collect())
}

/// Measures the rows in turn and records each result.
fn all(rows: &[Row], settings: &Settings, len: usize, record: &mut Record, queue: &Queue) -> Result<()> {
    let mut budget = Budget::new(settings.seconds);
    let mut copy = None;
    report::print_columns();
    for (idx, row) in rows.iter().enumerate() {
        let begun = Instant::now();
        let outcome = match budget.over() {
            Some(reason) => Outcome::NotRun(reason),
            None => Outcome::of(|| {
                Ok::<_, Box<dyn std::error::Error>>(figures(row, &measured(row, &mut copy, len, queue)?))
            }),
        };
        budget.took(begun.elapsed());
        report::print_row(record.set(idx, outcome)?);
    }
    Ok(())
}

/// Measures one row in turns with a copy of its size.
fn measured(row: &Row, copy: &mut Option<Copy>, len: usize, queue: &Queue) -> Result<Measured> {
    let copied = row.copied(len);
    if copy.as_ref().is_none_or(|copy| copy.params() != copied) {
        // Free the memory of the old copy before creating the new one.
        *copy = None;
        *copy = Some(Copy::new(copied, queue)?);
    }
    row.measure(copy.as_mut().ok_or("there is no copy to measure beside")?, queue)
}
