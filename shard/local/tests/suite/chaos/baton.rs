//! Threads that run one at a time: the thread that holds the baton runs.

use std::sync::{Condvar, Mutex, PoisonError};

/// Baton between the driver and one thread.
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

    /// Gives the baton from the driver to the thread, and waits for its return.
    pub(crate) fn resume(&self) {
        if self.give(Turn::Thread) {
            self.wait(|turn| turn != Turn::Thread);
        }
    }

    /// Gives the baton back from the thread, and waits to get it again.
    pub(crate) fn pause(&self) {
        self.give(Turn::Driver);
        self.begin();
    }

    /// Waits in the thread for the baton for the first time.
    pub(crate) fn begin(&self) {
        self.wait(|turn| turn == Turn::Thread);
    }

    /// Gives the baton back from the thread for the last time.
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
