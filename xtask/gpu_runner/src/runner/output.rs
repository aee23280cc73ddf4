//! Lines for the person or program that started the runner. A closed output never ends the run.

use std::io::Write;

/// A line on the standard output.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// A line on the standard error.
pub(crate) fn complain(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
