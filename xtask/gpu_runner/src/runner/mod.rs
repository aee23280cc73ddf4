//! Runner of a GPU bundle: starts the programs of one mode, each under a time limit, and keeps `results.json` up to date.
//!
//! [`plan`] lists the programs of a mode; [`run`] starts them in turn; [`child`] starts one program under a supervisor
//! ([`supervise`]), so that no program outlives the runner; [`suite`] and [`libtest`] run the test programs test by test;
//! [`report`] writes `results.json`.

mod child;
mod clock;
mod libtest;
mod logs;
mod machine;
mod nccl;
mod output;
mod plan;
mod report;
mod run;
mod settings;
mod suite;
mod supervise;

use plan::Mode;
use settings::Settings;
use std::process::ExitCode;

const USAGE: &str = "\
usage: run.sh MODE
  smoke-bench  a short benchmark, the full benchmark, then PyTorch's optimizers on the same cases
  tests        every test program, test by test
  profile      ncu on cases of the benchmark and compute-sanitizer on tests, if these tools are installed
  cpu          updates, collectives and steps of ranks on the CPU, alone and next to PyTorch with gloo
environment
  OUT          results folder (./results): results.json, logs.tar, and the files that the programs write
  DEADLINE     time limit of the whole run in seconds (540)
  LIMIT        time limit of each program in seconds (90; 200 for benchmarks)
  TEST_LIMIT   time limit of each test in seconds (30)";

/// Exit status for a wrong command line.
const WRONG_USAGE: u8 = 2;

/// Runs the mode named on the command line, or supervises a program.
pub(crate) fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    if args.first().is_some_and(|first| first == supervise::COMMAND) {
        return supervise::run(&args[1..]);
    }
    let mode = match &args[..] {
        [one] => one.to_str().and_then(Mode::named),
        _ => None,
    };
    let Some(mode) = mode else {
        output::complain(USAGE);
        return ExitCode::from(WRONG_USAGE);
    };
    match Settings::from_env().and_then(|settings| run::run(mode, settings)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            output::complain(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
