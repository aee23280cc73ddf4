//! Ends of processes, and the exit code of the launch.

use rustix::process::Signal;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// End of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Exit(i32),
    Signal(i32),
}

/// Reason why a launch failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// The process with this index failed first.
    Process(usize, End),
    /// The launcher got this signal.
    Signal(Signal),
}

/// Ends of all processes, and the first failure.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) ends: Vec<Option<End>>,
    pub(super) cause: Option<Cause>,
}

impl End {
    pub(super) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => End::Exit(code),
            (None, signal) => End::Signal(signal.unwrap_or(Signal::KILL.as_raw())),
        }
    }

    pub(super) fn is_success(self) -> bool {
        self == End::Exit(0)
    }

    /// Returns true for the codes of a rank that ended because it was asked to, such as after a checkpoint: those of SIGTERM and
    /// Ctrl-C.
    pub(super) fn is_on_request(self) -> bool {
        [Signal::TERM, Signal::INT].iter().any(|signal| self == End::Exit(128 + signal.as_raw()))
    }

    /// Returns the code that a shell reports.
    fn code(self) -> u8 {
        match self {
            End::Exit(code) => u8::try_from(code).unwrap_or(1),
            End::Signal(signal) => by_signal(signal),
        }
    }

    fn describe(self) -> String {
        match self {
            End::Exit(code) if self.is_on_request() => format!("ended on request, with {code}"),
            End::Exit(code) => format!("exited with {code}"),
            End::Signal(signal) => format!("was ended by signal {signal}{}", name(signal)),
        }
    }
}

impl Outcome {
    /// Returns the exit code of the first failure, else that of ranks that ended on request; 0 if there was neither.
    pub(super) fn code(&self) -> u8 {
        match self.cause {
            None => 0,
            Some(Cause::Process(_, end)) => end.code(),
            Some(Cause::Signal(signal)) => by_signal(signal.as_raw()),
        }
    }

    /// Prints the first failure, then the ends of the other processes that did not end well.
    pub(super) fn report(&self, labels: &[&str]) {
        self.lines(labels).iter().for_each(|line| eprintln!("launch: {line}"));
    }

    fn lines(&self, labels: &[&str]) -> Vec<String> {
        let (first, mut lines) = match self.cause {
            None => return Vec::new(),
            Some(Cause::Process(index, end)) => {
                (Some(index), vec![format!("{} {}", labels[index], end.describe())])
            }
            Some(Cause::Signal(signal)) => {
                (None, vec![format!("signal {}{} ended the launch", signal.as_raw(), name(signal.as_raw()))])
            }
        };
        let ends = self.ends.iter().enumerate();
        let failed = ends.filter_map(|(index, end)| Some((index, end.filter(|end| !end.is_success())?)));
        let others = failed.filter(|(index, _)| Some(*index) != first);
        lines.extend(others.map(|(index, end)| format!("after that {} {}", labels[index], end.describe())));
        lines
    }
}

fn by_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// Returns the name of a signal that often ends processes, in parentheses.
fn name(signal: i32) -> String {
    let known = [
        (Signal::HUP, "SIGHUP"),
        (Signal::INT, "SIGINT"),
        (Signal::ILL, "SIGILL"),
        (Signal::ABORT, "SIGABRT"),
        (Signal::BUS, "SIGBUS"),
        (Signal::FPE, "SIGFPE"),
        (Signal::KILL, "SIGKILL"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::PIPE, "SIGPIPE"),
        (Signal::TERM, "SIGTERM"),
        (Signal::USR1, "SIGUSR1"),
    ];
    let found = known.iter().find(|(known, _)| known.as_raw() == signal);
    found.map(|(_, name)| format!(" ({name})")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_named_first_and_good_ends_are_left_out() {
        let ends = vec![Some(End::Signal(15)), Some(End::Exit(3)), Some(End::Exit(0))];
        let outcome = Outcome { ends, cause: Some(Cause::Process(1, End::Exit(3))) };
        let lines = outcome.lines(&["rank 0", "rank 1", "rank 2"]);
        assert_eq!(lines, ["rank 1 exited with 3", "after that rank 0 was ended by signal 15 (SIGTERM)"]);
        assert_eq!(outcome.code(), 3);
    }

    #[test]
    fn codes_are_a_shells() {
        let status = |raw: i32| End::of(ExitStatus::from_raw(raw));
        assert_eq!([status(0), status(3 << 8), status(9)], [End::Exit(0), End::Exit(3), End::Signal(9)]);
        assert_eq!([status(3 << 8).code(), status(9).code()], [3, 137]);
        assert_eq!(name(64), "");
    }
}
