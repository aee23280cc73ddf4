//! The runner of a GPU bundle: starts the programs of one mode, each under a limit, and keeps `results.json` up to date.
//!
//! [`plan`] lists the programs of a mode; [`run`] starts them in turn; [`child`] starts one program under a supervisor
//! ([`supervise`]), so that no program outlives the runner; [`suite`] and [`libtest`] run the test programs test by test;
//! [`report`] is the record.

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
  smoke-bench  a short benchmark, the benchmark, then PyTorch's optimizers on the same cases
  tests        every test program, test by test
  profile      ncu over cases of the benchmark, compute-sanitizer over tests, where they are installed
  cpu          updates, collectives and steps of ranks on the CPU, alone and beside PyTorch with gloo
environment
  OUT          folder of the results (./results): results.json, logs.tar, and what the programs write
  DEADLINE     seconds for the whole run (540)
  LIMIT        seconds for each program (90; 200 for one that measures)
  TEST_LIMIT   seconds for each test (30)";

/// The exit status of a wrong command line.
const WRONG_USAGE: u8 = 2;

/// Runs the mode that the command line names, or supervises a program.
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
