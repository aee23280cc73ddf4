//! Starts one program under its supervisor. The program's outputs go to two logs, which the runner reads as they grow.

use super::clock::{Clock, Stop};
use super::supervise::{COMMAND, NOT_STARTED, SIGNALLED, TICK};
use anyhow::Context;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait for a supervisor to end after the runner has ordered it to end its program.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bytes of a program's output that the runner reads at once.
const PIECE: u64 = 1 << 20;

/// Limit of the logs in bytes. The runner ends a program that exceeds it, as it does at the time limit.
const MOST_LOGGED: u64 = 8 << 20;

/// A command line with its environment and its logs.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<OsString>,
    pub(crate) env: Vec<(String, OsString)>,
    pub(crate) stdout: PathBuf,
    pub(crate) stderr: PathBuf,
}

/// Outcome of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Exit(i32),
    Signal(i32),
    NotStarted,
    /// The program reached its limit of time, or filled its logs.
    Limit,
    /// The callback that reads the program's output asked for the end.
    Ended,
    /// The whole run ends.
    Stop(Stop),
}

/// Answer of the callback that reads a program's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    GoOn,
    End,
}

impl Launch {
    /// Runs the program for at most `limit`. `read` receives the standard output piece by piece, and an empty piece at each
    /// poll without new output.
    pub(crate) fn run(
        &self,
        limit: Duration,
        clock: &Clock,
        mut read: impl FnMut(&[u8]) -> Wish,
    ) -> anyhow::Result<End> {
        let until = Instant::now() + limit;
        let mut log = Tail::at_end(&self.stdout)?;
        let mut supervisor = self.start()?;
        loop {
            // Take the status before the output: output read after the exit is complete.
            let status = supervisor.try_wait().context("cannot wait for a supervisor")?;
            let wish = read(&log.more(PIECE)?);
            let over = || Instant::now() >= until || self.logs_are_full();
            let end = match status {
                Some(status) => Some(end_of(status)),
                None if wish == Wish::End => Some(End::Ended),
                None => clock.stop().map(End::Stop).or_else(|| over().then_some(End::Limit)),
            };
            if let Some(end) = end {
                if status.is_none() {
                    end_program(&mut supervisor);
                }
                self.cut_logs()?;
                read(&log.more(u64::MAX)?);
                return Ok(end);
            }
            thread::sleep(TICK);
        }
    }

    fn logs_are_full(&self) -> bool {
        let len = |path: &PathBuf| path.metadata().map_or(0, |data| data.len());
        len(&self.stdout) + len(&self.stderr) > MOST_LOGGED
    }

    /// Truncates logs that outgrew the limit before the program ended.
    fn cut_logs(&self) -> anyhow::Result<()> {
        for path in [&self.stdout, &self.stderr] {
            let file = append(path)?;
            if file.metadata().is_ok_and(|data| data.len() > MOST_LOGGED) {
                file.set_len(MOST_LOGGED).with_context(|| format!("cannot shorten {}", path.display()))?;
            }
        }
        Ok(())
    }

    fn start(&self) -> anyhow::Result<Child> {
        let runner = std::env::current_exe().context("cannot find the runner's own program")?;
        let mut supervisor = Command::new(runner);
        supervisor.arg(COMMAND).arg("--").arg(&self.program).args(&self.args);
        supervisor.envs(self.env.iter().map(|(name, value)| (name, value)));
        supervisor.stdin(Stdio::piped()).stdout(append(&self.stdout)?).stderr(append(&self.stderr)?);
        // A signal to the runner's process group must reach the runner only.
        supervisor.process_group(0);
        supervisor.spawn().with_context(|| format!("cannot start a supervisor of {}", self.program.display()))
    }
}

/// Orders the supervisor to end its program by closing its standard input, and waits for it.
fn end_program(supervisor: &mut Child) {
    drop(supervisor.stdin.take());
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        if !matches!(supervisor.try_wait(), Ok(None)) {
            return;
        }
        thread::sleep(TICK);
    }
    let _ = supervisor.kill();
    let _ = supervisor.wait();
}

fn end_of(status: ExitStatus) -> End {
    match status.code() {
        Some(code) if code == i32::from(NOT_STARTED) => End::NotStarted,
        Some(code) if code > SIGNALLED => End::Signal(code - SIGNALLED),
        Some(code) => End::Exit(code),
        // The supervisor itself was killed.
        None => End::Signal(std::os::unix::process::ExitStatusExt::signal(&status).unwrap_or(0)),
    }
}

fn append(path: &Path) -> anyhow::Result<File> {
    let opened = OpenOptions::new().create(true).append(true).open(path);
    opened.with_context(|| format!("cannot write {}", path.display()))
}

/// Reader of the bytes that are appended to a file after it was opened.
struct Tail {
    file: File,
}

impl Tail {
    fn at_end(path: &Path) -> anyhow::Result<Tail> {
        append(path)?;
        let mut file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        file.seek(SeekFrom::End(0)).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Tail { file })
    }

    /// Returns the new bytes, at most `most`.
    fn more(&mut self, most: u64) -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        (&mut self.file).take(most).read_to_end(&mut bytes).context("cannot read a log")?;
        Ok(bytes)
    }
}
