//! `meshstep-bench`: Meshstep measured on a real job. `meshstep-bench train` is what `cargo xtask train` runs.

mod cli;
mod corpus;
mod gpt;
mod keyed;
mod memory;
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

use cli::{Cli, Command, Train};

/// This package's folder in the workspace it was built in.
const FOLDER: &str = env!("CARGO_MANIFEST_DIR");

fn main() -> ExitCode {
    let Cli { command: Command::Train(asked) } = Cli::parse();
    match train(&asked) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Where stderr is closed, the exit code has to do.
            let _ = writeln!(io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn train(asked: &Train) -> Result<()> {
    threads::prepare(asked.threads, asked.ranks)?;
    log()?;
    let run = train::Run::prepare(asked, &Path::new(FOLDER).join("Cargo.toml"))?;
    let folder = asked.out.clone().unwrap_or_else(default_out);
    // Before the work and not after it: that is when one would rather hear that it cannot be.
    fs::create_dir_all(&folder).with_context(|| format!("--out {}: making the folder", folder.display()))?;
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

/// `target/train` of the workspace.
fn default_out() -> PathBuf {
    Path::new(FOLDER).with_file_name("target").join("train")
}

/// Lines as RUST_LOG asks for them, warnings where it is not set. Spans are told when they end, with their time.
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
