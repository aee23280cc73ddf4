//! Ranks of a training: threads of this process, or processes, of which this one is one rank.

pub(crate) mod bits;
mod gather;
mod launch;
mod portable;
pub(crate) mod progress;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod threads;
pub(crate) mod world;

pub(crate) use launch::Launch;
pub(crate) use portable::Portable;

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use meshstep_comm::{Communicator, loopback};

use crate::memory::{Process, Seen};
use progress::Progress;

/// Longest wait of processes that have no part in a run for the end of the run.
const LONGEST_RUN: Duration = Duration::from_secs(30 * 24 * 3600);

/// Ranks of this program.
#[derive(Clone, Debug)]
pub(crate) enum Ranks {
    /// Each rank is a thread of this process.
    Threads,
    /// Each rank is a process; the world joins them.
    Process(Arc<dyn Communicator>),
}

/// Results of all ranks of a run.
#[derive(Debug)]
pub(crate) struct Ran<T> {
    /// Results by rank.
    pub(crate) results: Vec<Result<T>>,
    /// Memory of all processes of the ranks together.
    pub(crate) process: Seen,
}

impl Ranks {
    /// Returns true if this process prints and writes the results.
    pub(crate) fn is_first(&self) -> bool {
        match self {
            Ranks::Threads => true,
            Ranks::Process(world) => world.rank() == 0,
        }
    }

    /// Returns true if each rank is a process.
    pub(crate) fn are_processes(&self) -> bool {
        matches!(self, Ranks::Process(_))
    }

    /// Returns stdout on the first process, and a sink on the others.
    pub(crate) fn stdout(&self) -> Box<dyn Write> {
        if self.is_first() { Box::new(io::stdout()) } else { Box::new(io::sink()) }
    }

    /// Creates the progress display of a run of `ranks` ranks. With processes, the first one displays its own losses.
    pub(crate) fn progress(
        &self,
        label: String,
        steps: usize,
        ranks: usize,
        tokens_per_step: usize,
    ) -> Progress {
        match self {
            Ranks::Threads => Progress::new(label, steps, ranks, tokens_per_step),
            Ranks::Process(_) if self.is_first() => Progress::new(label, steps, 1, tokens_per_step),
            Ranks::Process(_) => Progress::hidden(steps),
        }
    }

    /// Runs `body` on `ranks` ranks and returns the results of all of them, on every process.
    ///
    /// With processes, those above `ranks` only wait, and an error of this process's rank is returned at once: it ends the world,
    /// so that the other processes fail too.
    pub(crate) fn run<T: Portable>(
        &self,
        ranks: usize,
        body: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
    ) -> Result<Ran<T>> {
        match self {
            Ranks::Threads => {
                let process = Process::watch();
                let results = loopback::spawn(ranks, body)?;
                Ok(Ran { results, process: process.seen() })
            }
            Ranks::Process(world) => {
                let ran = among(world, ranks, body).with_context(|| format!("rank {}", world.rank()));
                ran.inspect_err(|_| world.abort())
            }
        }
    }
}

/// Runs `body` on this process, if its rank is below `ranks`, and gathers the results.
fn among<T: Portable>(
    world: &Arc<dyn Communicator>,
    ranks: usize,
    body: impl Fn(Arc<dyn Communicator>) -> Result<T>,
) -> Result<Ran<T>> {
    let (rank, world_size) = (world.rank(), world.world_size());
    ensure!(
        ranks <= world_size,
        "this run has {ranks} ranks, but {world_size} processes were started; start {ranks}"
    );
    let takes_part = rank < ranks;
    // A communicator for each run: its counts begin at 0.
    let own = world.split(takes_part.then_some(0), rank as i64)?;
    let process = Process::watch();
    let result = own.map(body).transpose()?;
    let message = portable::pack(result, process.seen())?;
    let within = (ranks < world_size).then_some(LONGEST_RUN);
    let (mut results, mut process) = (Vec::new(), Seen::default());
    for message in gather::gather(&**world, &message, within)? {
        let (result, seen) = portable::unpack(&message)?;
        results.extend(result.map(Ok));
        process = process.and(seen);
    }
    Ok(Ran { results, process })
}
