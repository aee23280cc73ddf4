//! Supervisor of one program: a process between runner and program that ends the program when the runner is gone.
//!
//! The runner holds the write end of the supervisor's standard input. An end of file on it, which the runner's death also
//! causes, is the order to end the program: SIGTERM to the program's process group, then SIGKILL to the group and to all
//! other descendants of the program.

use super::clock::noted_signals;
use super::output::complain;
use super::report::remove_parts;
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group, set_child_subreaper};
use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Subcommand that makes the runner a supervisor; `--`, the program and its arguments follow.
pub(crate) const COMMAND: &str = "supervise";

/// Exit status for a program that cannot be started.
pub(crate) const NOT_STARTED: u8 = 125;

/// Offset of exit statuses for signals: a signal's number plus 128, as in shells.
pub(crate) const SIGNALLED: i32 = 128;

/// Time between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_millis(700);

/// Time for killed processes to exit. A process that is blocked in a device driver may never exit.
const PATIENCE: Duration = Duration::from_secs(2);

pub(crate) const TICK: Duration = Duration::from_millis(15);

/// Runs the program after `--` to its end, and returns its exit status.
pub(crate) fn run(args: &[OsString]) -> ExitCode {
    match args {
        [dashes, program, args @ ..] if dashes == "--" => supervise(program, args).unwrap_or_else(|error| {
            complain(&format!("cannot start {}: {error:#}", program.display()));
            ExitCode::from(NOT_STARTED)
        }),
        _ => {
            complain("supervise takes `--`, a program and its arguments");
            ExitCode::from(NOT_STARTED)
        }
    }
}

fn supervise(program: &OsString, args: &[OsString]) -> anyhow::Result<ExitCode> {
    let ordered = noted_signals()?;
    watch_stdin(Arc::clone(&ordered));
    // Orphans of the program become children of this process, so that it can find and kill them.
    set_child_subreaper(Some(getpid()))?;
    let mut child = Command::new(program).args(args).stdin(Stdio::null()).process_group(0).spawn()?;
    let status = wait(&mut child, || ordered.load(Ordering::Relaxed))?;
    let status = match status {
        Some(status) => status,
        None => end(&mut child)?,
    };
    end_orphans(child.id());
    if ordered.load(Ordering::Relaxed)
        && let Some(out) = std::env::var_os("OUT")
    {
        remove_parts(Path::new(&out));
    }
    Ok(ExitCode::from(code(status)))
}

/// Sets the flag at the end of the standard input.
fn watch_stdin(ordered: Arc<AtomicBool>) {
    thread::spawn(move || {
        let mut byte = [0];
        // The runner never writes to this pipe.
        while matches!(std::io::stdin().read(&mut byte), Ok(1)) {}
        ordered.store(true, Ordering::Relaxed);
    });
}

/// Waits for the child. Returns `None` once `ordered` is true.
fn wait(child: &mut Child, ordered: impl Fn() -> bool) -> anyhow::Result<Option<ExitStatus>> {
    while !ordered() {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(TICK);
    }
    Ok(None)
}

/// Ends the child's process group: SIGTERM first, then SIGKILL.
fn end(child: &mut Child) -> anyhow::Result<ExitStatus> {
    signal_group(child.id(), Signal::TERM);
    let until = Instant::now() + GRACE;
    let status = wait(child, || Instant::now() >= until)?;
    signal_group(child.id(), Signal::KILL);
    let until = Instant::now() + PATIENCE;
    match status {
        Some(status) => Ok(status),
        None => Ok(wait(child, || Instant::now() >= until)?.unwrap_or(ExitStatus::from_raw(9))),
    }
}

fn signal_group(group: u32, signal: Signal) {
    if let Some(group) = pid(group) {
        // The group may no longer exist.
        let _ = kill_process_group(group, signal);
    }
}

/// Kills the remaining processes of the program's group, and its descendants outside the group.
fn end_orphans(group: u32) {
    signal_group(group, Signal::KILL);
    let until = Instant::now() + PATIENCE;
    loop {
        let orphans = children(std::process::id());
        if orphans.is_empty() || Instant::now() >= until {
            return;
        }
        for orphan in orphans.into_iter().filter_map(pid) {
            let _ = kill_process(orphan, Signal::KILL);
        }
        thread::sleep(TICK);
    }
}

fn pid(id: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(id).ok()?)
}

/// Returns the running children of a process.
fn children(parent: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let ids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(|id| runs_below(*id) == Some(parent)).collect()
}

/// Returns the parent of a process, or `None` if the process is a zombie or dead.
fn runs_below(id: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name in parentheses may contain spaces and parentheses.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (!["Z", "X"].contains(&state)).then_some(parent)
}

fn code(status: ExitStatus) -> u8 {
    let signalled = status.signal().map(|signal| SIGNALLED + signal);
    status.code().or(signalled).and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)
}
