//! `ckpt`: shows the content of a checkpoint, verifies it, and exports its parameters to one file for other programs.

mod evaluated;
mod export;
mod inspect;
mod table;
#[cfg(test)]
mod tests;
mod verify;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Args, Subcommand};
use meshstep_checkpoint::{CheckpointError, Saved, Store};

/// Subcommands of `ckpt`.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Ckpt {
    /// Show its tensors, files and settings. Reads only the manifest.
    Inspect(Which),
    /// Read every byte, compare every checksum, and list damage. Exits with 0 if nothing is damaged, 1 if something is, 2
    /// if there is no checkpoint to verify.
    Verify(Which),
    /// Write its parameters to one safetensors file, as whole tensors in their saved types. Parameters of a schedule-free rule are
    /// written where the model is evaluated, at the average, unless --state asks for the state of the trained ones.
    Export(Export),
}

/// Selects a step.
#[derive(Clone, Debug, Args)]
pub(crate) struct Which {
    /// A folder of checkpoints, to use its newest step; or the folder of one step
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Use this step of the folder instead
    #[arg(long, value_name = "STEP")]
    pub(crate) step: Option<u64>,
}

/// Options of `export`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Export {
    #[command(flatten)]
    pub(crate) which: Which,
    /// Output file for the parameters
    #[arg(long, value_name = "FILE")]
    pub(crate) to: PathBuf,
    /// Also write the rules' state, as PARAMETER.SLOT, and all parameters where they are trained
    #[arg(long)]
    pub(crate) state: bool,
    /// Replace the file if it exists
    #[arg(long)]
    pub(crate) force: bool,
}

/// Result of a verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Every byte is as it was written.
    Whole,
    /// Some bytes differ; the report lists them.
    Damaged,
}

/// Runs the subcommand, and prints to `out`.
pub(crate) fn run(asked: &Ckpt, out: &mut dyn std::io::Write) -> Result<Verdict> {
    match asked {
        Ckpt::Inspect(which) => write!(out, "{}", inspect::report(&open(which)?.saved))?,
        Ckpt::Verify(which) => return verify::run(which, out),
        Ckpt::Export(asked) => writeln!(out, "{}", export::run(&open(&asked.which)?.saved, asked)?)?,
    }
    Ok(Verdict::Whole)
}

/// An opened step. `latest` is true if LATEST confirms the hash of its manifest.
struct Opened {
    saved: Saved,
    latest: bool,
}

fn open(Which { dir, step }: &Which) -> Result<Opened, CheckpointError> {
    match (step, dir.join("manifest.json").exists()) {
        (Some(step), _) => {
            let store = Store::new(dir);
            let other = store.open(*step);
            of_store(&store, other)
        }
        (None, false) => Ok(Opened { saved: Store::new(dir).latest()?, latest: true }),
        (None, true) => {
            // The path may name the folder in any way, such as `.`.
            let real = fs::canonicalize(dir).unwrap_or_else(|_| dir.clone());
            let store = Store::new(real.parent().unwrap_or(Path::new("/")));
            of_store(&store, Saved::at(&real))
        }
    }
}

/// Checks an opened step against LATEST. If LATEST names the step with another manifest, that is an error.
fn of_store(store: &Store, opened: Result<Saved, CheckpointError>) -> Result<Opened, CheckpointError> {
    let saved = opened?;
    match store.latest() {
        Ok(newest) => Ok(Opened { latest: newest.dir() == saved.dir(), saved }),
        Err(CheckpointError::Hash { ref path, .. }) if path.parent() == Some(saved.dir()) => {
            store.latest().map(|saved| Opened { saved, latest: true })
        }
        Err(_) => Ok(Opened { saved, latest: false }),
    }
}
