//! `meshstep-bench`: measures Meshstep on a training job and against other systems. `cargo xtask train` and `bench` run its
//! subcommands of these names.

mod args;
mod cli;
mod corpus;
mod gpt;
mod keyed;
mod local;
mod measure;
mod memory;
mod mesh;
mod network;
mod ranks;
mod report;
mod train;

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::parser::ValueSource;
use clap::{CommandFactory as _, FromArgMatches as _};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

use args::FOLDER;
use args::train::Train;
use cli::{Cli, Command};
use ranks::{Launch, Ranks};
use train::signals::{Signals, Stopped};

/// Exit code if the work could not be done; exit code 1 means that it was done and found a difference.
const NOT_DONE: u8 = 2;

fn main() -> ExitCode {
    let matches = Cli::command().get_matches();
    let ranks_given = matches
        .subcommand_matches("train")
        .is_some_and(|train| train.value_source("ranks") == Some(ValueSource::CommandLine));
    let command = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli.command,
        Err(error) => error.exit(),
    };
    match command {
        Command::Train(asked) => run_train(asked, ranks_given),
        Command::Bench(asked) => match bench(&asked) {
            Ok(measure::Verdict::Holds) => ExitCode::SUCCESS,
            Ok(measure::Verdict::Missed) => ExitCode::FAILURE,
            Err(error) => complain(&format!("{error:#}"), ExitCode::from(NOT_DONE)),
        },
        Command::Rank(asked) => match measure::rank::run(&asked) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => complain(&format!("{error:#}"), ExitCode::from(NOT_DONE)),
        },
        Command::Worker(asked) => match network::worker::run(&asked) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => complain(&format!("{error:#}"), ExitCode::from(NOT_DONE)),
        },
    }
}

fn run_train(mut asked: Train, ranks_given: bool) -> ExitCode {
    if asked.local.local.is_none() {
        return run_sharded(&mut asked, ranks_given);
    }
    match prepare(&mut asked, ranks_given).and_then(|ranks| train_locally(&asked, ranks)) {
        Ok(local::Verdict::Holds) => ExitCode::SUCCESS,
        Ok(local::Verdict::Missed) => ExitCode::FAILURE,
        Err(error) => complain(&format!("{error:#}"), ExitCode::from(NOT_DONE)),
    }
}

/// Trains without workers; a signal ends the run at the next step boundary, and the exit code says so.
fn run_sharded(asked: &mut Train, ranks_given: bool) -> ExitCode {
    // First of all: an earlier signal ends the process.
    let signals = match Signals::listen() {
        Ok(signals) => signals,
        Err(error) => return complain(&format!("{error:#}"), ExitCode::FAILURE),
    };
    let mut is_first = true;
    let trained = prepare(asked, ranks_given).and_then(|ranks| {
        is_first = ranks.is_first();
        train(asked, ranks, &signals)
    });
    match trained {
        Ok(()) if signals.preemption().is_requested() => ExitCode::from(signals.code()),
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => match error.downcast_ref::<Stopped>() {
            Some(stopped) => {
                if is_first {
                    // If stderr is closed, the exit code has to suffice.
                    let _ = writeln!(io::stderr(), "{stopped}");
                }
                ExitCode::from(signals.code())
            }
            None => complain(&format!("{error:#}"), ExitCode::FAILURE),
        },
    }
}

/// Sets up threads and logging, and joins the other processes, if a launcher has started this one as one rank of several.
fn prepare(asked: &mut Train, ranks_given: bool) -> Result<Ranks> {
    // An elastic worker is one rank, however it was started.
    let is_elastic = !asked.local.arbiter.is_empty();
    let launch = if is_elastic { Launch::Alone } else { Launch::from_env()? };
    launch.settle(asked, ranks_given)?;
    asked.check_ranks()?;
    let one_rank = is_elastic || launch.world_size().is_some();
    ranks::threads::prepare(asked.threads, launch.ranks_here(asked), one_rank)?;
    log()?;
    ranks::world::join(&launch)
}

fn complain(error: &str, code: ExitCode) -> ExitCode {
    // If stderr is closed, the exit code has to suffice.
    let _ = writeln!(io::stderr(), "error: {error}");
    code
}

fn train(asked: &Train, ranks: Ranks, signals: &Signals) -> Result<()> {
    let folder = asked.out.clone().unwrap_or_else(|| default_out("train"));
    if ranks.is_first() {
        // Create the folder before the work, so that a failure shows early.
        fs::create_dir_all(&folder)
            .with_context(|| format!("--out {}: cannot create the folder", folder.display()))?;
    }
    if asked.meshes().is_empty() {
        train_stages(asked, ranks, signals, &folder)
    } else {
        train_on_meshes(asked, ranks, signals, &folder)
    }
}

fn train_stages(asked: &Train, ranks: Ranks, signals: &Signals, folder: &Path) -> Result<()> {
    let mut out = ranks.stdout();
    let is_first = ranks.is_first();
    let run = train::Run::prepare(asked, &Path::new(FOLDER).join("Cargo.toml"), folder)?;
    let mut run = run.among(ranks).ended_by(signals);
    writeln!(out, "{run}\n")?;
    if let Some(slots) = asked.slots {
        let compared = run.over_slots(slots)?;
        writeln!(out, "\n{compared}")?;
        return match compared.difference {
            Some(difference) => bail!("parameters differ: {difference}"),
            None => Ok(()),
        };
    }
    let report = run.train()?;
    writeln!(out, "\n{}", report.table())?;
    if is_first {
        report.write(folder)?;
        writeln!(out, "wrote loss.svg and train.json to {}", folder.display())?;
    }
    write!(out, "{}", report.digests())?;
    match &report.difference {
        Some(difference) => bail!("parameters differ: {difference}"),
        None => Ok(writeln!(out, "{}", report.agreement())?),
    }
}

fn bench(asked: &args::bench::Bench) -> Result<measure::Verdict> {
    let folder = asked.out.clone().unwrap_or_else(|| default_out("bench"));
    measure::run(asked, &folder, network::run, &mut io::stdout())
}

fn train_locally(asked: &Train, ranks: Ranks) -> Result<local::Verdict> {
    let folder = asked.out.clone().unwrap_or_else(|| default_out("train"));
    let mut out = ranks.stdout();
    local::run(asked, ranks, &Path::new(FOLDER).join("Cargo.toml"), &folder, &mut out)
}

fn train_on_meshes(asked: &Train, ranks: Ranks, signals: &Signals, folder: &Path) -> Result<()> {
    let mut out = ranks.stdout();
    let is_first = ranks.is_first();
    let run = mesh::Run::prepare(asked, &Path::new(FOLDER).join("Cargo.toml"), folder)?;
    let run = run.among(ranks).ended_by(signals);
    writeln!(out, "{run}\n")?;
    let trained = run.train()?;
    writeln!(out, "\n{}", mesh::table(&trained))?;
    if is_first {
        report::write_json(&trained, &folder.join("train.json"))?;
    }
    write!(out, "{}", mesh::digests(&trained))?;
    let verdict = mesh::Verdict::of(&trained);
    writeln!(out, "{verdict}")?;
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
