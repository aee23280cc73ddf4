//! Decisions of the launcher: which signal goes to the ranks, when, and which failure was the first. No processes, no clock.

use super::outcome::{Cause, End, Outcome};
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// Time that ranks have to end by themselves after the first failure: most fail in consequence, and say what they saw.
pub(super) const LAST_WORDS: Duration = Duration::from_millis(500);

/// Time that ranks have to end after the SIGTERM that follows a failure, before SIGKILL.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// State of a launch.
#[derive(Debug)]
pub(super) struct Supervision {
    /// End of each process; `None` while it runs.
    ends: Vec<Option<End>>,
    cause: Option<Cause>,
    /// True after the first Ctrl-C.
    interrupted: bool,
    /// Signals that the ranks were sent.
    sent: Vec<i32>,
    /// Next signal to the ranks, and its time.
    due: Option<(Instant, Signal)>,
}

/// Consequence of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The signal goes to every process that still runs.
    Send(Signal),
}

impl Supervision {
    pub(super) fn new(processes: usize) -> Self {
        Self { ends: vec![None; processes], cause: None, interrupted: false, sent: Vec::new(), due: None }
    }

    /// Returns true once all processes have ended.
    pub(super) fn is_over(&self) -> bool {
        self.ends.iter().all(Option::is_some)
    }

    /// Returns the time at which [`time_is_up`](Self::time_is_up) is to be called.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due.map(|(at, _)| at)
    }

    /// A process has ended; the first failure ends the others, a moment later. The end of a rank that was asked to end is no failure:
    /// the others may still save.
    pub(super) fn ended(&mut self, index: usize, end: End, now: Instant) {
        self.ends[index] = Some(end);
        let first_failure = match self.cause {
            _ if end.is_success() || self.was_asked(end) => false,
            Some(Cause::Process(_, earlier)) => self.was_asked(earlier),
            None | Some(Cause::Signal(_)) => true,
        };
        if first_failure {
            self.cause = Some(Cause::Process(index, end));
            self.due = Some((now + LAST_WORDS, Signal::TERM));
        } else if !end.is_success() {
            self.cause.get_or_insert(Cause::Process(index, end));
        }
    }

    /// Returns true for the end of a rank that was asked to end, by a code of its own or by a signal that it did not handle.
    fn was_asked(&self, end: End) -> bool {
        end.is_on_request() || matches!(end, End::Signal(signal) if self.sent.contains(&signal))
    }

    /// The launcher got a signal, which goes to all ranks; they have the time that the sender leaves them. The second Ctrl-C kills
    /// them.
    pub(super) fn signal(&mut self, signal: Signal) -> Action {
        match signal {
            Signal::INT if self.interrupted => {
                self.cause = Some(Cause::Signal(signal));
                self.due = None;
                return self.forward(Signal::KILL);
            }
            Signal::INT => self.interrupted = true,
            // A warning: ranks that handle it choose their codes.
            Signal::USR1 => {}
            _ => {
                self.cause.get_or_insert(Cause::Signal(signal));
            }
        }
        // A closed terminal is a request to end.
        self.forward(if signal == Signal::HUP { Signal::TERM } else { signal })
    }

    fn forward(&mut self, signal: Signal) -> Action {
        self.sent.push(signal.as_raw());
        Action::Send(signal)
    }

    /// The time of the next signal to the ranks has come.
    pub(super) fn time_is_up(&mut self, now: Instant) -> Option<Action> {
        let (_, signal) = self.due?;
        Some(self.send(signal, now))
    }

    pub(super) fn into_outcome(self) -> Outcome {
        Outcome { ends: self.ends, cause: self.cause }
    }

    fn send(&mut self, signal: Signal, now: Instant) -> Action {
        self.due = (signal == Signal::TERM).then_some((now + GRACE, Signal::KILL));
        self.forward(signal)
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
        three.ended(2, End::Exit(0), now);
        assert_eq!((three.deadline(), three.time_is_up(now)), (None, None));
        three.ended(1, End::Exit(7), now);
        assert_eq!((three.deadline(), three.time_is_up(now)), (Some(now + LAST_WORDS), TERM));
        assert_eq!((three.deadline(), three.time_is_up(now)), (Some(now + GRACE), KILL));
        assert_eq!((three.deadline(), three.is_over()), (None, false));
        three.ended(0, End::Signal(9), now);
        assert!(three.is_over());
        assert_eq!(three.into_outcome().code(), 7);
    }

    #[test]
    fn a_second_failure_changes_neither_time_nor_code() {
        let now = Instant::now();
        let mut three = Supervision::new(3);
        three.ended(0, End::Signal(11), now);
        three.ended(1, End::Exit(1), now + LAST_WORDS / 2);
        assert_eq!((three.deadline(), three.is_over()), (Some(now + LAST_WORDS), false));
        three.ended(2, End::Exit(2), now + LAST_WORDS);
        assert!(three.is_over());
        assert_eq!(three.into_outcome().code(), 128 + 11);
        let mut well = Supervision::new(2);
        [0, 1].into_iter().for_each(|index| well.ended(index, End::Exit(0), now));
        assert_eq!((well.is_over(), well.into_outcome().code()), (true, 0));
    }

    #[test]
    fn one_interrupt_is_forwarded_and_a_second_kills() {
        let now = Instant::now();
        let mut two = Supervision::new(2);
        assert_eq!(two.signal(Signal::INT), Action::Send(Signal::INT));
        assert_eq!((two.deadline(), two.signal(Signal::INT)), (None, Action::Send(Signal::KILL)));
        two.ended(0, End::Signal(9), now);
        two.ended(1, End::Signal(9), now);
        assert_eq!(two.into_outcome().code(), 128 + 2);
        // Ranks that handle the interrupt may end well.
        let mut two = Supervision::new(2);
        two.signal(Signal::INT);
        two.ended(0, End::Exit(0), now);
        two.ended(1, End::Exit(0), now);
        assert_eq!(two.into_outcome().code(), 0);
    }

    #[test]
    fn other_signals_go_to_the_ranks_without_a_deadline() {
        let now = Instant::now();
        for (signal, sent, codes) in [
            (Signal::TERM, Signal::TERM, [143, 143]),
            (Signal::HUP, Signal::TERM, [129, 129]),
            (Signal::USR1, Signal::USR1, [143, 0]),
        ] {
            let mut two = Supervision::new(2);
            assert_eq!((two.signal(signal), two.deadline()), (Action::Send(sent), None));
            // A scheduler warns, and later insists.
            assert_eq!((two.signal(Signal::TERM), two.deadline()), (Action::Send(Signal::TERM), None));
            two.ended(0, End::Signal(15), now);
            two.ended(1, End::Exit(0), now);
            let expected = if signal == Signal::HUP { 129 } else { 143 };
            assert_eq!((two.deadline(), two.into_outcome().code()), (None, expected));
            let mut saved = Supervision::new(2);
            saved.signal(signal);
            [0, 1].into_iter().for_each(|index| saved.ended(index, End::Exit(143), now));
            assert_eq!(saved.deadline(), None);
            let mut done = Supervision::new(2);
            done.signal(signal);
            [0, 1].into_iter().for_each(|index| done.ended(index, End::Exit(0), now));
            assert_eq!([saved.into_outcome().code(), done.into_outcome().code()], codes);
        }
    }

    #[test]
    fn a_rank_that_dies_by_a_signal_from_the_launcher_does_not_hurry_the_others() {
        let now = Instant::now();
        for signal in [Signal::USR1, Signal::INT] {
            let mut three = Supervision::new(3);
            three.signal(signal);
            three.ended(0, End::Signal(signal.as_raw()), now);
            three.ended(1, End::Exit(143), now);
            assert_eq!(three.deadline(), None, "rank 2 still saves");
            three.ended(2, End::Exit(7), now);
            assert_eq!(three.into_outcome().code(), 7);
        }
        // The same signal from elsewhere is a failure.
        let mut two = Supervision::new(2);
        two.ended(0, End::Signal(Signal::USR1.as_raw()), now);
        assert_eq!(two.deadline(), Some(now + LAST_WORDS));
    }

    #[test]
    fn a_rank_that_ends_on_request_does_not_hurry_the_others_and_a_failure_does() {
        let now = Instant::now();
        let mut three = Supervision::new(3);
        three.ended(1, End::Exit(143), now);
        assert_eq!((three.deadline(), three.is_over()), (None, false));
        three.ended(0, End::Exit(1), now);
        assert_eq!((three.deadline(), three.time_is_up(now)), (Some(now + LAST_WORDS), TERM));
        three.ended(2, End::Exit(130), now);
        assert_eq!(three.into_outcome().code(), 1);
        // A rank that could not save fails the launch, though a signal came first.
        let mut two = Supervision::new(2);
        two.signal(Signal::TERM);
        two.ended(0, End::Exit(143), now);
        two.ended(1, End::Exit(1), now);
        assert_eq!((two.deadline(), two.into_outcome().code()), (Some(now + LAST_WORDS), 1));
        // So does one that the system killed while it saved.
        let mut two = Supervision::new(2);
        two.signal(Signal::TERM);
        two.ended(0, End::Signal(9), now);
        assert_eq!(two.deadline(), Some(now + LAST_WORDS));
        two.ended(1, End::Exit(143), now);
        assert_eq!(two.into_outcome().code(), 128 + 9);
    }
}
