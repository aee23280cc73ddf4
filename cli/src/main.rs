//! `meshstep`: commands for jobs that train with Meshstep. `launch` starts ranks, `arbiter` serves elastic workers, `plan` computes
//! memory and traffic before a job starts, `ckpt` reads checkpoints, `parity` replays another program's steps.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line program")]

mod arbiter;
mod ckpt;
mod cli;
#[cfg(target_os = "linux")]
mod launch;
mod number;
mod parity;
mod plan;

use std::io;
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory as _, Parser as _};

use cli::{Cli, Command};

/// Exit code if the work could not be done; exit code 1 means that it was done and found a difference or damage.
const NOT_DONE: u8 = 2;

fn main() -> ExitCode {
    // An `Err` from main would print the error's Debug form.
    run(Cli::parse().command).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(NOT_DONE)
    })
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        #[cfg(target_os = "linux")]
        Command::Launch(asked) => launch::run(&asked),
        #[cfg(target_os = "linux")]
        Command::LaunchedRank(asked) => launch::become_rank(&asked),
        Command::Arbiter(asked) => arbiter::run(&asked, &mut io::stdout()).map(|()| ExitCode::SUCCESS),
        Command::Plan(asked) => plan::run(&asked, &mut io::stdout()).map(|()| ExitCode::SUCCESS),
        Command::Ckpt(asked) => Ok(match ckpt::run(&asked, &mut io::stdout())? {
            ckpt::Verdict::Whole => ExitCode::SUCCESS,
            ckpt::Verdict::Damaged => ExitCode::FAILURE,
        }),
        Command::Parity(asked) => Ok(match parity::run(&asked)? {
            parity::Verdict::Agrees => ExitCode::SUCCESS,
            parity::Verdict::Differs => ExitCode::FAILURE,
            parity::Verdict::Unreplayable => ExitCode::from(NOT_DONE),
        }),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "meshstep", &mut script);
            io::Write::write_all(&mut io::stdout(), &script)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
