//! Lines printed for the person or program that started the runner. A closed output does not end the run.

use std::io::Write;

/// Prints a line on the standard output.
pub(crate) fn say(line: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// Prints a line on the standard error.
pub(crate) fn complain(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
