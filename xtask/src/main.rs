//! Workspace tasks: `ci` runs every check, `check` the checks of changed packages, `tidy` checks the tree's rules,
//! `kernels` compiles the CUDA kernels, `train`, `bench`, `parity`, `ckpt` and `arbiter` start the bench binary, and `launch` starts it
//! as several processes.
//!
//! xtask depends on no member, so that it builds in seconds and runs when a member does not compile.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line program")]

mod bench;
mod check;
mod ci;
mod cli;
mod cmd;
mod gpu_bundle;
mod kernels;
#[cfg(target_os = "linux")]
mod launch;
mod mutants;
mod parallel;
mod tidy;
mod wheels;
mod workspace;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    // Printed here, because an `Err` from main would add a backtrace, and most errors are wrong files or commands.
    run(cli::Cli::parse().task).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        // Exit status 1 is reserved for `parity` (a trace is not met) and `ckpt verify` (damage found).
        ExitCode::from(2)
    })
}

fn run(task: cli::Task) -> anyhow::Result<ExitCode> {
    match task {
        cli::Task::Train { args } => bench::run("train", &args),
        cli::Task::Bench { args } => bench::run("bench", &args),
        cli::Task::Parity { args } => bench::run("parity", &args),
        cli::Task::Ckpt { args } => bench::run("ckpt", &args),
        cli::Task::Arbiter { args } => bench::run("arbiter", &args),
        #[cfg(target_os = "linux")]
        cli::Task::Launch(args) => launch::run(&args),
        #[cfg(target_os = "linux")]
        cli::Task::LaunchedRank(args) => launch::become_rank(&args),
        cli::Task::Check(args) => check::run(&args),
        cli::Task::Ci(args) => ci::run(&args),
        cli::Task::Mutants(args) => mutants::run(&args),
        cli::Task::Kernels(args) => {
            kernels::run(&args, &workspace::Workspace::find()?).map(|()| ExitCode::SUCCESS)
        }
        cli::Task::GpuBundle => gpu_bundle::run(&workspace::Workspace::find()?).map(|()| ExitCode::SUCCESS),
        cli::Task::Tidy(args) => tidy::run(&args, &workspace::Workspace::find()?).map(|()| ExitCode::SUCCESS),
    }
}
