//! Stub that becomes a rank: asks the system for its own death with the launcher's, then runs the program in its place.
//!
//! The request belongs to the process and outlives the change of its program. A child of `Command` could make it only in unsafe code
//! between fork and exec.

use super::{LaunchedRank, not_started};
use anyhow::{Context, bail};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Returns the arguments with which this program becomes `program`, whose own arguments follow.
pub(super) fn words(program: &Path) -> [OsString; 4] {
    ["launched-rank".into(), std::process::id().to_string().into(), "--".into(), program.into()]
}

/// Becomes the program; returns only if that fails.
pub(crate) fn become_rank(args: &LaunchedRank) -> anyhow::Result<std::process::ExitCode> {
    let Some((program, args_of_program)) = args.command.split_first() else { bail!("no program") };
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot tie a rank to its launcher")?;
    // A launcher that ended before the request is no longer the parent.
    if getppid().map(|parent| parent.as_raw_nonzero().get()) != Some(args.launcher) {
        bail!("the launcher has ended");
    }
    Err(Command::new(program).args(args_of_program).exec()).with_context(|| not_started(Path::new(program)))
}
