//! Ranks of this library, and the socket reference, as processes of this program.

use std::env;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::ValueEnum as _;
use meshstep_bench_cases::processes::Processes;
use serde_json::Value;
use tempfile::TempDir;

use crate::measure::rank::Way;

/// Pause before and after a turn, as other systems have (`Torch::run`).
const REST: Duration = Duration::from_millis(20);

/// Processes that exchange bytes one way.
#[derive(Debug)]
pub(crate) struct Group {
    processes: Processes,
    /// Folder of the ranks' addresses.
    _folder: TempDir,
}

impl Group {
    /// Starts `ranks` processes.
    pub(crate) fn start(way: Way, ranks: usize) -> Result<Self> {
        let program = env::current_exe().context("finding this program's file")?;
        let folder = tempfile::tempdir().context("making a folder for the ranks to meet")?;
        let name = way.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        let command = |rank: usize| command(&program, &name, (rank, ranks), folder.path());
        let processes = Processes::start(&name, ranks, command)?;
        Ok(Group { processes, _folder: folder })
    }

    /// Prepares a case.
    pub(crate) fn case(&mut self, case: Value) -> Result<()> {
        self.processes.case(case)
    }

    /// Runs the case once and returns its seconds.
    pub(crate) fn run(&mut self) -> Result<f64> {
        sleep(REST);
        let seconds = self.processes.run()?;
        sleep(REST);
        Ok(seconds)
    }
}

fn command(program: &Path, way: &str, (rank, ranks): (usize, usize), meet: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("rank").args(["--way", way]);
    command.args(["--rank", &rank.to_string(), "--ranks", &ranks.to_string()]).arg("--meet").arg(meet);
    // A rank computes with one thread, as those of the other systems do.
    command.env("RAYON_NUM_THREADS", "1").stderr(Stdio::inherit());
    command
}
