//! `meshstep-bench`: measures Meshstep on a training job and against other systems. `cargo xtask train`, `bench`, `parity`
//! and `ckpt` run its subcommands of these names.

mod args;
mod ckpt;
mod cli;
mod corpus;
mod gpt;
mod keyed;
mod local;
mod measure;
mod memory;
mod mesh;
mod network;
mod parity;
mod progress;
mod report;
mod threads;
mod train;

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::Parser as _;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

use args::train::Train;
use cli::{Cli, Command};
use parity::Verdict;

/// This package's folder in the workspace of the build.
const FOLDER: &str = env!("CARGO_MANIFEST_DIR");

/// Exit code if the work could not be done; exit code 1 means that it was done and found a difference.
const NOT_DONE: u8 = 2;

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Train(asked) if asked.local.local.is_some() => match train_locally(&asked) {
            Ok(local::Verdict::Holds) => ExitCode::SUCCESS,
            Ok(local::Verdict::Missed) => ExitCode::FAILURE,
            Err(error) => complain(&format!("{error:#}"), ExitCode::from(NOT_DONE)),
        },
        Command::Train(asked) => match train(&asked) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => complain(&format!("{error:#}"), ExitCode::FAILURE),
        },
        Command::Parity(asked) => match parity::run(&asked) {
            Ok(Verdict::Agrees) => ExitCode::SUCCESS,
            Ok(Verdict::Differs) => ExitCode::FAILURE,
            Ok(Verdict::Unreplayable) => ExitCode::from(NOT_DONE),
            Err(reason) => complain(&reason.to_string(), ExitCode::from(NOT_DONE)),
        },
        Command::Bench(asked) => match bench(&asked) {
            Ok(measure::Verdict::Holds) => ExitCode::SUCCESS,
            Ok(measure::Verdict::Missed) => ExitCode::FAILURE,
            Err(error) => complain(&format!("{error:#}"), ExitCode::from(NOT_DONE)),
        },
        Command::Ckpt(asked) => match ckpt::run(&asked, &mut io::stdout()) {
            Ok(ckpt::Verdict::Whole) => ExitCode::SUCCESS,
            Ok(ckpt::Verdict::Damaged) => ExitCode::FAILURE,
            Err(error) => complain(&format!("{error:#}"), ExitCode::from(NOT_DONE)),
        },
    }
}

fn complain(error: &str, code: ExitCode) -> ExitCode {
    // If stderr is closed, the exit code has to suffice.
    let _ = writeln!(io::stderr(), "error: {error}");
    code
}

fn train(asked: &Train) -> Result<()> {
    threads::prepare(asked.threads, asked.most_ranks())?;
    log()?;
    let folder = asked.out.clone().unwrap_or_else(|| default_out("train"));
    // Create the folder before the work, so that a failure shows early.
    fs::create_dir_all(&folder)
        .with_context(|| format!("--out {}: cannot create the folder", folder.display()))?;
    if !asked.meshes().is_empty() {
        return train_on_meshes(asked, &folder);
    }
    let run = train::Run::prepare(asked, &Path::new(FOLDER).join("Cargo.toml"), &folder)?;
    writeln!(io::stdout(), "{run}\n")?;
    let report = run.train()?;
    writeln!(io::stdout(), "\n{}", report.table())?;
    report.write(&folder)?;
    writeln!(io::stdout(), "wrote loss.svg and train.json to {}", folder.display())?;
    match &report.difference {
        Some(difference) => bail!("parameters differ: {difference}"),
        None => Ok(writeln!(io::stdout(), "{}", report.agreement())?),
    }
}

fn bench(asked: &args::bench::Bench) -> Result<measure::Verdict> {
    let folder = asked.out.clone().unwrap_or_else(|| default_out("bench"));
    measure::run(asked, &folder, &mut io::stdout())
}

fn train_locally(asked: &Train) -> Result<local::Verdict> {
    threads::prepare(asked.threads, asked.most_ranks())?;
    log()?;
    let folder = asked.out.clone().unwrap_or_else(|| default_out("train"));
    local::run(asked, &Path::new(FOLDER).join("Cargo.toml"), &folder, &mut io::stdout())
}

fn train_on_meshes(asked: &Train, folder: &Path) -> Result<()> {
    let run = mesh::Run::prepare(asked, &Path::new(FOLDER).join("Cargo.toml"), folder)?;
    writeln!(io::stdout(), "{run}\n")?;
    let trained = run.train()?;
    writeln!(io::stdout(), "\n{}", mesh::table(&trained))?;
    report::write_json(&trained, &folder.join("train.json"))?;
    let verdict = mesh::Verdict::of(&trained);
    writeln!(io::stdout(), "{verdict}")?;
    if verdict.holds() { Ok(()) } else { bail!("the results of meshes or stages differ") }
}

/// Returns a folder in `target` of the workspace.
fn default_out(name: &str) -> PathBuf {
    Path::new(FOLDER).with_file_name("target").join(name)
}

/// Logs lines as RUST_LOG selects, warnings by default. Spans are logged at their end, with their time.
fn log() -> Result<()> {
    let filter = match std::env::var_os(EnvFilter::DEFAULT_ENV) {
        Some(_) => {
            EnvFilter::try_from_default_env().context("RUST_LOG is not a filter; try RUST_LOG=debug")?
        }
        None => EnvFilter::new("warn"),
    };
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_span_events(FmtSpan::CLOSE);
    lines.with_writer(io::stderr).init();
    Ok(())
}
