//! Decisions of the launcher: which signal goes to the ranks, when, and which failure was the first. No processes, no clock.

use super::outcome::{Cause, End, Outcome};
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// Time that ranks have to end after SIGTERM, before SIGKILL.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// State of a launch.
#[derive(Debug)]
pub(super) struct Supervision {
    /// End of each process; `None` while it runs.
    ends: Vec<Option<End>>,
    cause: Option<Cause>,
    /// Number of interrupts so far.
    interrupts: usize,
    /// Time of the SIGKILL.
    deadline: Option<Instant>,
}

/// Consequence of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The signal goes to every process that still runs.
    Send(Signal),
}

impl Supervision {
    pub(super) fn new(processes: usize) -> Self {
        Self { ends: vec![None; processes], cause: None, interrupts: 0, deadline: None }
    }

    /// Returns true once all processes have ended.
    pub(super) fn is_over(&self) -> bool {
        self.ends.iter().all(Option::is_some)
    }

    /// Returns the time at which [`time_is_up`](Self::time_is_up) is to be called.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// A process has ended; the first failure ends the others.
    pub(super) fn ended(&mut self, index: usize, end: End, now: Instant) -> Option<Action> {
        self.ends[index] = Some(end);
        if end.is_success() || self.cause.is_some() {
            return None;
        }
        self.cause = Some(Cause::Process(index, end));
        (!self.is_over()).then(|| self.terminate(now))
    }

    /// The launcher got a signal. The first Ctrl-C goes to all ranks, the second kills them; other signals end them.
    pub(super) fn signal(&mut self, signal: Signal, now: Instant) -> Option<Action> {
        self.interrupts += 1;
        if self.interrupts == 1 && signal == Signal::INT {
            return Some(Action::Send(Signal::INT));
        }
        self.cause.get_or_insert(Cause::Signal(signal));
        if self.interrupts == 1 {
            return Some(self.terminate(now));
        }
        self.deadline = None;
        Some(Action::Send(Signal::KILL))
    }

    /// The grace after SIGTERM is over.
    pub(super) fn time_is_up(&mut self) -> Option<Action> {
        self.deadline = None;
        Some(Action::Send(Signal::KILL))
    }

    pub(super) fn into_outcome(self) -> Outcome {
        Outcome { ends: self.ends, cause: self.cause }
    }

    fn terminate(&mut self, now: Instant) -> Action {
        self.deadline = Some(now + GRACE);
        Action::Send(Signal::TERM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERM: Option<Action> = Some(Action::Send(Signal::TERM));
    const KILL: Option<Action> = Some(Action::Send(Signal::KILL));

    #[test]
    fn the_first_failure_ends_the_others_and_gives_the_code() {
        let now = Instant::now();
        let mut three = Supervision::new(3);
        assert_eq!(three.ended(2, End::Exit(0), now), None);
        assert_eq!((three.ended(1, End::Exit(7), now), three.deadline()), (TERM, Some(now + GRACE)));
        assert_eq!((three.time_is_up(), three.deadline(), three.is_over()), (KILL, None, false));
        assert_eq!((three.ended(0, End::Signal(9), now), three.is_over()), (None, true));
        assert_eq!(three.into_outcome().code(), 7);
    }

    #[test]
    fn nothing_is_sent_to_processes_that_have_all_ended() {
        let now = Instant::now();
        let mut one = Supervision::new(1);
        assert_eq!((one.ended(0, End::Signal(11), now), one.deadline()), (None, None));
        assert_eq!(one.into_outcome().code(), 128 + 11);
        let mut well = Supervision::new(2);
        assert_eq!([0, 1].map(|index| well.ended(index, End::Exit(0), now)), [None; 2]);
        assert_eq!(well.into_outcome().code(), 0);
    }

    #[test]
    fn one_interrupt_is_forwarded_and_a_second_kills() {
        let now = Instant::now();
        let mut two = Supervision::new(2);
        assert_eq!(two.signal(Signal::INT, now), Some(Action::Send(Signal::INT)));
        assert_eq!((two.deadline(), two.signal(Signal::INT, now)), (None, KILL));
        two.ended(0, End::Signal(9), now);
        two.ended(1, End::Signal(9), now);
        assert_eq!(two.into_outcome().code(), 128 + 2);
        // Ranks that handle the interrupt may end well.
        let mut two = Supervision::new(2);
        two.signal(Signal::INT, now);
        two.ended(0, End::Exit(0), now);
        two.ended(1, End::Exit(0), now);
        assert_eq!(two.into_outcome().code(), 0);
    }

    #[test]
    fn other_signals_end_the_ranks_with_a_grace() {
        let now = Instant::now();
        let mut two = Supervision::new(2);
        assert_eq!((two.signal(Signal::TERM, now), two.deadline()), (TERM, Some(now + GRACE)));
        assert_eq!(two.ended(0, End::Signal(15), now), None);
        assert_eq!(two.signal(Signal::TERM, now), KILL);
        two.ended(1, End::Exit(0), now);
        assert_eq!(two.into_outcome().code(), 128 + 15);
    }
}
