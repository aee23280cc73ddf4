//! Levels of thread support, and the lock that makes calls one at a time where the library needs it.

use ::mpi::ffi;
use std::ffi::c_int;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Level of thread support, from the lowest to the highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ThreadLevel {
    /// One thread in the process.
    Single,
    /// Calls from the thread that initialised MPI alone.
    Funneled,
    /// Calls from any thread, one at a time: a lock of this backend sees to that.
    Serialized,
    /// Calls from any thread, at any time.
    Multiple,
}

impl ThreadLevel {
    /// Number of the level in the library.
    pub(super) fn number(self) -> c_int {
        (match self {
            ThreadLevel::Single => ffi::MPI_THREAD_SINGLE,
            ThreadLevel::Funneled => ffi::MPI_THREAD_FUNNELED,
            ThreadLevel::Serialized => ffi::MPI_THREAD_SERIALIZED,
            ThreadLevel::Multiple => ffi::MPI_THREAD_MULTIPLE,
        }) as c_int
    }

    /// Returns the highest level that is not above the library's number.
    pub(super) fn of(number: c_int) -> Self {
        use ThreadLevel::{Funneled, Multiple, Serialized, Single};
        let levels = [Multiple, Serialized, Funneled];
        levels.into_iter().find(|level| level.number() <= number).unwrap_or(Single)
    }
}

impl fmt::Display for ThreadLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ThreadLevel::Single => "MPI_THREAD_SINGLE",
            ThreadLevel::Funneled => "MPI_THREAD_FUNNELED",
            ThreadLevel::Serialized => "MPI_THREAD_SERIALIZED",
            ThreadLevel::Multiple => "MPI_THREAD_MULTIPLE",
        })
    }
}

/// Runs calls one at a time if the library does not run them side by side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Serial {
    one_at_a_time: bool,
}

/// Held during every call at [`ThreadLevel::Serialized`]. One for the process, as the library is.
static TURN: Mutex<()> = Mutex::new(());

impl Serial {
    /// Returns the rule of `level`, or `None` if threads may not take turns at that level.
    pub(super) fn of(level: ThreadLevel) -> Option<Self> {
        let one_at_a_time = level < ThreadLevel::Multiple;
        (level >= ThreadLevel::Serialized).then_some(Serial { one_at_a_time })
    }

    /// Runs `call` when it may run. The call does not wait for another rank.
    pub(super) fn run<T>(self, call: impl FnOnce() -> T) -> T {
        let _turn = self.one_at_a_time.then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
        call()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_the_librarys_and_two_of_them_suffice() {
        use ThreadLevel::{Funneled, Multiple, Serialized, Single};
        for level in [Single, Funneled, Serialized, Multiple] {
            assert_eq!(ThreadLevel::of(level.number()), level);
        }
        assert!(Serial::of(Single).is_none() && Serial::of(Funneled).is_none());
        assert!(Serial::of(Serialized).is_some_and(|serial| serial.one_at_a_time));
        assert!(Serial::of(Multiple).is_some_and(|serial| !serial.one_at_a_time));
    }
}
