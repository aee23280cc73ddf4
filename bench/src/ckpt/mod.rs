//! `ckpt`: what is in a checkpoint, whether it is what was written, and its parameters as one file for other programs.

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
use meshstep_shard::checkpoint::{CheckpointError, Saved, Store};

/// What can be asked of a checkpoint.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Ckpt {
    /// Show its tensors, files and settings. Reads the manifest alone.
    Inspect(Which),
    /// Read every byte, compare every checksum, and list what is damaged. Exits with 0 where nothing is, 1 where something
    /// is, 2 where there is nothing to look at.
    Verify(Which),
    /// Write its parameters to one safetensors file, whole and in the types they are saved in.
    Export(Export),
}

/// Which step.
#[derive(Clone, Debug, Args)]
pub(crate) struct Which {
    /// A folder of checkpoints, of which the newest is taken; or one step's folder
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Take this step of the folder instead
    #[arg(long, value_name = "STEP")]
    pub(crate) step: Option<u64>,
}

/// Options of `export`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Export {
    #[command(flatten)]
    pub(crate) which: Which,
    /// Where the parameters go
    #[arg(long, value_name = "FILE")]
    pub(crate) to: PathBuf,
    /// Write the rules' state too, as PARAMETER.SLOT
    #[arg(long)]
    pub(crate) state: bool,
    /// Replace the file if it is there
    #[arg(long)]
    pub(crate) force: bool,
}

/// Whether a checkpoint is what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Every byte.
    Whole,
    /// Some bytes are not; they were named.
    Damaged,
}

/// Does what is asked, and prints to `out`.
pub(crate) fn run(asked: &Ckpt, out: &mut dyn std::io::Write) -> Result<Verdict> {
    match asked {
        Ckpt::Inspect(which) => write!(out, "{}", inspect::report(&open(which)?.saved))?,
        Ckpt::Verify(which) => return verify::run(which, out),
        Ckpt::Export(asked) => writeln!(out, "{}", export::run(&open(&asked.which)?.saved, asked)?)?,
    }
    Ok(Verdict::Whole)
}

/// A step, and whether LATEST vouches for its manifest.
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
            // The folder may be called by any path.
            let real = fs::canonicalize(dir).unwrap_or_else(|_| dir.clone());
            let store = Store::new(real.parent().unwrap_or(Path::new("/")));
            of_store(&store, Saved::at(&real))
        }
    }
}

/// What was opened, and whether it is the newest. Where LATEST names it and tells another manifest, that is an error.
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
