//! `launch`: starts a program as several processes, one for each rank, and ends all of them together.

mod args;
mod lines;
mod outcome;
mod process;
mod screen;
mod signals;
mod stub;
mod supervise;
mod variables;

use anyhow::{Context, bail};
use args::Backend;
pub(crate) use args::{Launch, LaunchedRank};
use outcome::Outcome;
use process::{Event, Output, Process};
use screen::Screen;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
pub(crate) use stub::become_rank;
use supervise::{Action, Supervision};

/// Longest wait for the output of processes that have ended: a process of another session may hold their pipes open.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// Command lines of the processes to start.
#[derive(Debug)]
struct Plan {
    processes: Vec<Command>,
}

/// One process to start: its label in messages, its command line and its variables.
#[derive(Debug)]
struct Command {
    label: String,
    program: PathBuf,
    args: Vec<OsString>,
    variables: Vec<(String, String)>,
    /// Variables that the process does not inherit.
    removed: Vec<&'static str>,
    output: Output,
}

/// Starts the processes and waits for their end. Returns the exit code of the first failure.
pub(crate) fn run(args: &Launch) -> anyhow::Result<ExitCode> {
    let Some((program, rest)) = args.command.split_first() else { bail!("no program to launch") };
    let program = Path::new(program);
    let screen = Arc::new(Screen::new());
    let plan = match args.backend {
        Backend::Tcp => Plan::of_ranks(args.ranks, program, rest, screen.is_terminal())?,
        Backend::Mpi => Plan::of_mpirun(args.ranks, program, rest),
    };
    // Signals that arrive from here on are forwarded.
    let (sender, events) = mpsc::channel();
    signals::forward(&sender)?;
    let mut processes = Vec::new();
    for command in &plan.processes {
        match Process::start(command, processes.len(), &screen, &sender) {
            Ok(process) => processes.push(process),
            Err(error) => {
                processes.iter_mut().for_each(Process::kill_and_reap);
                return Err(error);
            }
        }
    }
    let outcome = supervise(&mut processes, &events);
    let until = Instant::now() + LAST_OUTPUT;
    processes.iter_mut().for_each(|process| process.finish_output(until));
    screen.clear();
    outcome.report(&plan.processes.iter().map(|command| command.label.as_str()).collect::<Vec<_>>());
    Ok(ExitCode::from(outcome.code()))
}

impl Plan {
    fn of_ranks(ranks: u16, program: &Path, args: &[OsString], terminal: bool) -> anyhow::Result<Self> {
        let job = variables::Job::draw(ranks.into())?;
        let command = |rank: usize| Command {
            label: format!("rank {rank}"),
            program: program.to_owned(),
            args: args.to_vec(),
            variables: job.of_rank(rank, terminal),
            removed: variables::REMOVED.to_vec(),
            output: Output::Prefixed(format!("[{rank}] ")),
        };
        Ok(Plan { processes: (0..ranks.into()).map(command).collect() })
    }

    /// Starts mpirun, which starts the ranks and passes their output on.
    fn of_mpirun(ranks: u16, program: &Path, args: &[OsString]) -> Self {
        let words = ["-n".into(), ranks.to_string().into(), program.as_os_str().to_owned()];
        Plan {
            processes: vec![Command {
                label: "mpirun".to_owned(),
                program: "mpirun".into(),
                args: words.into_iter().chain(args.iter().cloned()).collect(),
                variables: variables::of_mpirun(),
                removed: variables::REMOVED.to_vec(),
                output: Output::Inherited,
            }],
        }
    }
}

/// Waits until all processes have ended, and does what [`Supervision`] says.
fn supervise(processes: &mut [Process], events: &Receiver<Event>) -> Outcome {
    let mut supervision = Supervision::new(processes.len());
    while !supervision.is_over() {
        let event = match supervision.deadline() {
            // The channel stays open: the signals' threads hold senders.
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => events.recv_timeout(at.saturating_duration_since(Instant::now())),
        };
        let now = Instant::now();
        let action = match event {
            Ok(Event::Ended(index)) => {
                let end = processes[index].reap();
                supervision.ended(index, end, now);
                None
            }
            Ok(Event::Signal(signal)) => Some(supervision.signal(signal)),
            Err(_) => supervision.time_is_up(now),
        };
        if let Some(Action::Send(signal)) = action {
            processes.iter().for_each(|process| process.signal(signal));
        }
    }
    supervision.into_outcome()
}

/// Describes a failure to start.
fn not_started(program: &Path) -> String {
    format!("cannot start {}", program.display())
}

/// Returns this program's file, which starts ranks as [`stub`].
fn own_program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("cannot find this program's own file, which starts the ranks")
}
