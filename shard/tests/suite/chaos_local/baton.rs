//! Threads of which one runs at a time: the one that has the baton.

use std::sync::{Condvar, Mutex, PoisonError};

/// Between the driver and one thread.
#[derive(Debug)]
pub(crate) struct Gate {
    turn: Mutex<Turn>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Turn {
    Driver,
    Thread,
    Ended,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Gate { turn: Mutex::new(Turn::Driver), changed: Condvar::new() }
    }

    /// The driver gives the baton to the thread, and waits until it has it back.
    pub(crate) fn resume(&self) {
        if self.give(Turn::Thread) {
            self.wait(|turn| turn != Turn::Thread);
        }
    }

    /// The thread gives the baton back, and waits until it gets it again.
    pub(crate) fn pause(&self) {
        self.give(Turn::Driver);
        self.begin();
    }

    /// The thread waits for the baton for the first time.
    pub(crate) fn begin(&self) {
        self.wait(|turn| turn == Turn::Thread);
    }

    /// The thread gives the baton back for good.
    pub(crate) fn end(&self) {
        self.give(Turn::Ended);
    }

    fn give(&self, to: Turn) -> bool {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if *turn == Turn::Ended {
            return false;
        }
        *turn = to;
        self.changed.notify_all();
        true
    }

    fn wait(&self, until: impl Fn(Turn) -> bool) {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        while !until(*turn) {
            turn = self.changed.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
