//! The launcher's stdout and stderr, shared by all ranks: whole lines, and below them on a terminal the status of a rank.

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Control sequence of terminals that returns to the first column and clears the line.
const CLEAR: &[u8] = b"\r\x1b[2K";

/// Stream of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Stdout,
    Stderr,
}

/// Both streams, and the status that stands on the terminal.
#[derive(Debug)]
pub(super) struct Screen {
    terminal: bool,
    status: Mutex<Vec<u8>>,
}

impl Screen {
    pub(super) fn new() -> Self {
        Self { terminal: io::stderr().is_terminal(), status: Mutex::default() }
    }

    /// Returns true if a status can be shown.
    pub(super) fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Writes a line, above the status.
    pub(super) fn line(&self, target: Target, prefix: &str, line: &[u8]) {
        let status = self.lock();
        if !status.is_empty() {
            write(Target::Stderr, CLEAR);
        }
        write(target, &[prefix.as_bytes(), line, b"\n"].concat());
        if !status.is_empty() {
            write(Target::Stderr, &status);
        }
    }

    /// Replaces the status; an empty one disappears. Without a terminal a status is not shown.
    pub(super) fn status(&self, prefix: &str, status: &[u8]) {
        if !self.terminal {
            return;
        }
        let mut shown = self.lock();
        if shown.is_empty() && status.is_empty() {
            return;
        }
        shown.clear();
        if !status.is_empty() {
            shown.extend_from_slice(prefix.as_bytes());
            shown.extend_from_slice(status);
        }
        write(Target::Stderr, &[CLEAR, &shown].concat());
    }

    /// Removes the status.
    pub(super) fn clear(&self) {
        self.status("", b"");
    }

    /// Returns the status, also after a panic (decision 119): it is text for people.
    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes at once. A reader that has gone must not stop the ranks, so errors are ignored.
fn write(target: Target, bytes: &[u8]) {
    let _ = match target {
        Target::Stdout => {
            let mut out = io::stdout().lock();
            out.write_all(bytes).and_then(|()| out.flush())
        }
        Target::Stderr => io::stderr().lock().write_all(bytes),
    };
}
