//! How close every step on a GPU is to memory speed: against the device's own copy of memory, in the same run.
//!
//! Each case is first taken one step and compared with the CPU, bit for bit; then copy and case take turns, timed by the
//! device's clock, and what counts is the median of each. Prints a table, and writes `gpu-bench.json` into $OUT, or the file
//! that is given. `GPU_BENCH_LOG2` sets the number of parameters (30), `GPU_BENCH_ROUNDS` the rounds (51), `GPU_BENCH_ONLY` a
//! part of the cases' names. The stand-in for a driver has no speed: on it `GPU_BENCH_STANDIN=1` tries the program, and marks
//! what it writes.
#![allow(clippy::print_stdout, reason = "a program that measures and prints")]

mod report;

use meshstep_bench_cases::gpu::{Copy, Result, cases, fitting, lbfgs, measure};
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::{self, Device, Stream};
use report::{Report, Row, Setup};
use std::process::ExitCode;

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
    let driver = match cuda::probe() {
        Ok(driver) => driver,
        Err(missing) if std::env::var_os("REQUIRE_GPU").is_some() => return Err(missing.into()),
        Err(missing) => {
            println!("skipped: {missing}");
            return Ok(());
        }
    };
    if driver.stand_in && std::env::var("GPU_BENCH_STANDIN").as_deref() != Ok("1") {
        return Err(
            "the stand-in for a driver has no speed; GPU_BENCH_STANDIN=1 tries this program on it".into()
        );
    }
    let device = Device::open(0)?;
    let queue = Queue::cuda(Stream::new(&device)?);
    let rounds = setting("GPU_BENCH_ROUNDS", 51)?.max(1);
    let len = fitting(setting("GPU_BENCH_LOG2", 30)?, &queue)?;
    let setup = Setup::new(&device, driver, len, rounds)?;
    setup.print();
    let mut report = Report::new(setup);
    let mut copy = Copy::new(len, &queue)?;
    let only = std::env::var("GPU_BENCH_ONLY").unwrap_or_default();
    for case in cases().into_iter().filter(|case| case.name.contains(&only)) {
        let measured = measure(&case, &mut copy, (len, rounds), &queue)?;
        let row = Row { name: case.name, bytes_each: case.bytes(), params: len, waits: 0.0 };
        report.add(&row, &measured);
    }
    if lbfgs::NAME.contains(&only) {
        let params = lbfgs::params(len);
        let row = Row { name: lbfgs::NAME, bytes_each: lbfgs::BYTES, params, waits: 1.0 };
        report.add(&row, &lbfgs::measure(&mut copy, params, rounds, &queue)?);
    }
    report.end()
}

/// A number from the environment.
fn setting(name: &str, default: usize) -> Result<usize> {
    let Some(text) = std::env::var_os(name) else { return Ok(default) };
    let number = text.to_str().and_then(|text| text.parse().ok());
    number.ok_or_else(|| format!("{name} is {text:?}, no number").into())
}
