//! Looks after the workspace: `ci` runs every check, `tidy` reads the tree, `train` starts the main job.
//!
//! It depends on no member, so that it builds in seconds and still runs when a member does not compile.

#![allow(clippy::print_stdout, reason = "a program whose answer is what it prints")]

mod ci;
mod cli;
mod cmd;
mod tidy;
mod train;
mod workspace;

use clap::Parser;
use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    match cli::Cli::parse().task {
        cli::Task::Train { args } => train::run(&args),
        cli::Task::Ci(args) => ci::run(&args),
        cli::Task::Tidy => tidy::run(&workspace::Workspace::find()?).map(|()| ExitCode::SUCCESS),
    }
}
