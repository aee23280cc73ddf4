//! One process of a launch: its start in a process group of its own, its signals, its end, and its output line by line.

use super::lines::{Lines, Piece};
use super::outcome::End;
use super::screen::{Screen, Target};
use super::{Command, not_started, own_program, stub};
use anyhow::Context;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Bytes read at once.
const PIECE: usize = 1 << 16;
/// Interval between two looks at threads that end within a moment.
const LOOK: Duration = Duration::from_millis(5);

/// Event of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The process with this index has ended and is not reaped yet.
    Ended(usize),
    /// The launcher got a signal.
    Signal(Signal),
}

/// Destination of a process's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Output {
    /// Line by line behind a prefix.
    Prefixed(String),
    /// The launcher's own stdout and stderr.
    Inherited,
}

/// A started process.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    pid: Pid,
    reaped: bool,
    readers: Vec<JoinHandle<()>>,
}

impl Process {
    /// Starts a process, and sends its end to `events`. The calling thread must live until the process has ended, because the
    /// system kills the process when that thread ends.
    pub(super) fn start(
        command: &Command,
        index: usize,
        screen: &Arc<Screen>,
        events: &Sender<Event>,
    ) -> anyhow::Result<Self> {
        let mut child = spawn(command)?;
        let pid = Pid::from_child(&child);
        let pipes =
            [(boxed(child.stdout.take()), Target::Stdout), (boxed(child.stderr.take()), Target::Stderr)];
        // An error below drops the process, which kills it.
        let mut process = Process { child, pid, reaped: false, readers: Vec::new() };
        if let Output::Prefixed(prefix) = &command.output {
            for (pipe, target) in pipes {
                let (pipe, screen, prefix) = (pipe.context("no pipe")?, Arc::clone(screen), prefix.clone());
                process.readers.push(thread("output", move || pass_on(pipe, target, &screen, &prefix))?);
            }
        }
        let events = events.clone();
        let watch = move || {
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
            // The launcher no longer listens once all processes have been reaped.
            let _ = events.send(Event::Ended(index));
        };
        thread("end of a rank", watch)?;
        Ok(process)
    }

    /// Sends a signal to the process and its children. The number of a process that is not reaped belongs to no other process.
    pub(super) fn signal(&self, signal: Signal) {
        if !self.reaped {
            // A process group that is gone needs no signal.
            let _ = kill_process_group(self.pid, signal);
        }
    }

    /// Takes the end of a process that has ended, after killing the children that it left in its group.
    pub(super) fn reap(&mut self) -> End {
        self.signal(Signal::KILL);
        let status = self.child.wait();
        self.reaped = true;
        // Only the launcher reaps its processes, so the wait does not fail.
        status.map_or(End::Signal(Signal::KILL.as_raw()), End::of)
    }

    /// Kills the process and waits for its end.
    pub(super) fn kill_and_reap(&mut self) {
        if !self.reaped {
            self.reap();
        }
    }

    /// Waits until the output has been passed on, at most until `until`.
    pub(super) fn finish_output(&mut self, until: Instant) {
        for reader in self.readers.drain(..) {
            while !reader.is_finished() && Instant::now() < until {
                std::thread::sleep(LOOK);
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill_and_reap();
    }
}

/// Starts the command by way of the stub, so that it ends with the launcher.
fn spawn(command: &Command) -> anyhow::Result<Child> {
    let mut start = std::process::Command::new(own_program()?);
    start.args(stub::words(&command.program)).args(&command.args);
    for name in &command.removed {
        start.env_remove(name);
    }
    start.envs(command.variables.iter().map(|(name, value)| (name, value)));
    start.stdin(Stdio::null());
    if let Output::Prefixed(_) = command.output {
        start.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    // A terminal sends Ctrl-C to the launcher's group only; the launcher forwards it.
    start.process_group(0);
    start.spawn().with_context(|| not_started(&command.program))
}

fn boxed(pipe: Option<impl Read + Send + 'static>) -> Option<Box<dyn Read + Send>> {
    pipe.map(|pipe| Box::new(pipe) as _)
}

fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> anyhow::Result<JoinHandle<()>> {
    Builder::new().name(name.to_owned()).spawn(body).context("cannot start a thread")
}

/// Passes all output of a pipe on to the screen.
fn pass_on(mut pipe: impl Read, target: Target, screen: &Screen, prefix: &str) {
    let (mut lines, mut bytes) = (Lines::default(), vec![0; PIECE]);
    let mut show = |piece: Piece<'_>| match piece {
        Piece::Line(line) => screen.line(target, prefix, line),
        Piece::Status(status) => screen.status(prefix, status),
    };
    loop {
        match pipe.read(&mut bytes) {
            Ok(0) => break,
            Ok(len) => lines.add(&bytes[..len], &mut show),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    lines.finish(&mut show);
}
