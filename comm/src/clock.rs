//! Clocks for deadlines and delays: the machine's, or a manual one for tests.

use crate::sync::Mutex;
use std::fmt::Debug;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Source of time of a communicator. Clones read the same time.
#[derive(Clone, Debug)]
pub struct Clock {
    time: Time,
}

#[derive(Clone, Debug)]
enum Time {
    Real { origin: Instant },
    Manual(Arc<Manual>),
}

#[derive(Debug, Default)]
struct Manual {
    now: Mutex<Duration>,
    waiters: Mutex<Vec<Weak<dyn Wake>>>,
}

/// Waiter that re-checks the time when a manual clock moves.
///
/// ```
/// use meshstep_comm::{Clock, Wake};
/// use std::sync::atomic::{AtomicU32, Ordering};
/// use std::sync::{Arc, Weak};
/// use std::time::Duration;
///
/// #[derive(Debug, Default)]
/// struct Waiter(AtomicU32);
///
/// impl Wake for Waiter {
///     fn wake(&self) {
///         self.0.fetch_add(1, Ordering::Relaxed); // a condition variable, usually
///     }
/// }
///
/// let (clock, waiter) = (Clock::manual(), Arc::new(Waiter::default()));
/// let weak: Weak<Waiter> = Arc::downgrade(&waiter);
/// clock.register(weak);
/// clock.advance(Duration::from_secs(600)); // no test waits for ten minutes
/// assert_eq!((clock.now().as_secs(), waiter.0.load(Ordering::Relaxed)), (600, 1));
/// ```
pub trait Wake: Send + Sync + Debug {
    /// Wakes every wait. A wait that read the time before the move must be asleep when this notifies it, so an implementation
    /// takes the lock that its waits hold while awake.
    fn wake(&self);
}

impl Clock {
    /// Returns the machine's monotonic clock.
    pub fn real() -> Self {
        Clock { time: Time::Real { origin: Instant::now() } }
    }

    /// Returns a clock that stands at zero until [`advance`](Clock::advance) moves it.
    pub fn manual() -> Self {
        Clock { time: Time::Manual(Arc::default()) }
    }

    /// Time since the creation of the clock.
    pub fn now(&self) -> Duration {
        match &self.time {
            Time::Real { origin } => origin.elapsed(),
            Time::Manual(manual) => *manual.now.lock(),
        }
    }

    /// Moves a manual clock and wakes all waits. Does nothing on a real clock.
    pub fn advance(&self, by: Duration) {
        let Time::Manual(manual) = &self.time else { return };
        {
            let mut now = manual.now.lock();
            *now = now.saturating_add(by);
        }
        let waiters: Vec<_> = manual.waiters.lock().iter().filter_map(Weak::upgrade).collect();
        waiters.iter().for_each(|waiter| waiter.wake());
    }

    /// Returns the duration to sleep until the time `until`; `None` if only [`Wake::wake`] ends the sleep.
    pub fn sleep_for(&self, until: Duration) -> Option<Duration> {
        match &self.time {
            Time::Real { origin } => Some(until.saturating_sub(origin.elapsed())),
            Time::Manual(_) => None,
        }
    }

    /// Registers `waiter` to be woken at every advance, for as long as it lives.
    pub fn register(&self, waiter: Weak<dyn Wake>) {
        let Time::Manual(manual) = &self.time else { return };
        let mut waiters = manual.waiters.lock();
        waiters.retain(|waiter| waiter.strong_count() > 0);
        waiters.push(waiter);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_stands_still_until_it_is_moved() {
        let clock = Clock::manual();
        let same = clock.clone();
        assert_eq!(clock.now(), Duration::ZERO);
        clock.advance(Duration::from_secs(3));
        clock.advance(Duration::from_millis(5));
        assert_eq!(same.now(), Duration::from_millis(3005));
        clock.advance(Duration::MAX);
        assert_eq!(same.now(), Duration::MAX);
    }

    #[test]
    fn a_real_clock_cannot_be_moved() {
        let clock = Clock::real();
        clock.advance(Duration::from_secs(1000));
        assert!(clock.now() < Duration::from_secs(900));
    }
}
