//! Workspace tasks: `ci` runs every check, `check` the checks of changed packages, `tidy` checks the tree's rules,
//! `kernels` compiles the CUDA kernels, `train` and `bench` start the bench program, `launch` starts it as several processes, and
//! `parity`, `ckpt`, `plan` and `arbiter` start `meshstep`.
//!
//! xtask depends on no member, so that it builds in seconds and runs when a member does not compile.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command-line program")]

mod check;
mod ci;
mod cli;
mod cmd;
mod cold_build;
mod complaints;
mod gpu_bundle;
mod kernels;
mod mutants;
mod parallel;
mod programs;
mod release;
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
        cli::Task::Train { args } => programs::train(&args),
        cli::Task::Bench { args } => programs::bench("bench", &args),
        cli::Task::Parity { args } => programs::meshstep("parity", &args),
        cli::Task::Ckpt { args } => programs::meshstep("ckpt", &args),
        cli::Task::Arbiter { args } => programs::meshstep("arbiter", &args),
        cli::Task::Plan { args } => programs::meshstep("plan", &args),
        cli::Task::Launch { args } => programs::launch(&args),
        cli::Task::Check(args) => check::run(&args),
        cli::Task::Ci(args) => ci::run(&args),
        cli::Task::Mutants(args) => mutants::run(&args),
        cli::Task::Kernels(args) => {
            kernels::run(&args, &workspace::Workspace::find()?).map(|()| ExitCode::SUCCESS)
        }
        cli::Task::GpuBundle => gpu_bundle::run(&workspace::Workspace::find()?).map(|()| ExitCode::SUCCESS),
        cli::Task::Release => release::run(&workspace::Workspace::find()?),
        cli::Task::ColdBuild => cold_build::run(&workspace::Workspace::find()?),
        cli::Task::Complaints => complaints::run(&workspace::Workspace::find()?),
        cli::Task::Tidy(args) => tidy::run(&args, &workspace::Workspace::find()?).map(|()| ExitCode::SUCCESS),
    }
}
