//! Looks after the workspace: `ci` runs every check, `check` those of what changed, `tidy` reads the tree, `kernels` compiles the CUDA kernels, `train`,
//! `bench`, `parity` and `ckpt` start the bench binary.
//!
//! It depends on no member, so that it builds in seconds and still runs when a member does not compile.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program whose answer is what it prints")]

mod bench;
mod check;
mod ci;
mod cli;
mod cmd;
mod gpu_bundle;
mod kernels;
mod mutants;
mod parallel;
mod tidy;
mod wheels;
mod workspace;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    // Printed here, because an `Err` from main would add a backtrace to what is mostly a wrong file or command.
    run(cli::Cli::parse().task).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        // 1 is what `parity` says of a trace that is met differently, and `ckpt verify` of damage.
        ExitCode::from(2)
    })
}

fn run(task: cli::Task) -> anyhow::Result<ExitCode> {
    match task {
        cli::Task::Train { args } => bench::run("train", &args),
        cli::Task::Bench { args } => bench::run("bench", &args),
        cli::Task::Parity { args } => bench::run("parity", &args),
        cli::Task::Ckpt { args } => bench::run("ckpt", &args),
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
