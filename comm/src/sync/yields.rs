//! Short waits that give the processor away instead of sleeping.
//!
//! A sleep and its wake-up take tens of microseconds, more where an idle processor halts. A thread that yields sees a notification at
//! once, if every thread that runs meanwhile is as brief. Beside a thread that computes, a yield returns only when that thread's time
//! slice ends, milliseconds later, while a sleeping thread is woken before that. Therefore a thread measures its yields: after a slow
//! one it sleeps at once in its next waits, in more of them each time.

use std::cell::Cell;
use std::thread::yield_now;
use std::time::{Duration, Instant};

/// Longest wait without sleep: about the time of a sleep and a wake-up.
const LONGEST: Duration = Duration::from_micros(60);
/// Time of a yield from which other threads count as busy.
const SLOW: Duration = Duration::from_micros(150);
/// Waits that sleep at once after the first slow yield, and the maximum after many.
const RESTS: u32 = 64;
const MOST_RESTS: u32 = 8192;
/// Waits without a slow yield after which the first slow yield counts as the first again.
const FORGOTTEN: u32 = 512;

/// What a thread knows about its yields.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Habits {
    /// Waits that still sleep at once.
    rests: u32,
    /// Waits that will after the next slow yield.
    next: u32,
    /// Waits since the last slow yield.
    quick: u32,
}

thread_local! {
    static HABITS: Cell<Habits> = const { Cell::new(Habits { rests: 0, next: RESTS, quick: 0 }) };
}

impl Habits {
    /// Returns true if this wait sleeps at once.
    fn rest(&mut self) -> bool {
        let rests = self.rests > 0;
        self.rests = self.rests.saturating_sub(1);
        rests
    }

    fn was_quick(&mut self) {
        self.quick += 1;
        if self.quick >= FORGOTTEN {
            (self.next, self.quick) = (RESTS, 0);
        }
    }

    fn was_slow(&mut self) {
        self.rests = self.next;
        self.next = MOST_RESTS.min(2 * self.next);
        self.quick = 0;
    }
}

/// Yields until `is_over`, unless that takes long or yields are slow.
pub(crate) fn until(is_over: impl FnMut() -> bool) {
    let mut habits = HABITS.get();
    if !habits.rest() {
        if short_wait(is_over) { habits.was_quick() } else { habits.was_slow() }
    }
    HABITS.set(habits);
}

/// Returns false after a slow yield.
fn short_wait(mut is_over: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    let mut before = begun;
    while !is_over() && before.duration_since(begun) < LONGEST {
        yield_now();
        let now = Instant::now();
        if now.duration_since(before) >= SLOW {
            return false;
        }
        before = now;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_yields_are_followed_by_more_and_more_sleeps() {
        let mut habits = Habits { rests: 0, next: RESTS, quick: 0 };
        let mut sleeps = Vec::new();
        for _ in 0..10 {
            assert!(!habits.rest());
            habits.was_slow();
            let mut rests = 0;
            while habits.rests > 0 {
                rests += u32::from(habits.rest());
            }
            sleeps.push(rests);
        }
        assert_eq!(sleeps, [64, 128, 256, 512, 1024, 2048, 4096, 8192, 8192, 8192]);
        (0..FORGOTTEN - 1).for_each(|_| habits.was_quick());
        assert_eq!(habits.next, MOST_RESTS);
        habits.was_quick();
        assert_eq!(habits, Habits { rests: 0, next: RESTS, quick: 0 });
    }

    #[test]
    fn a_short_wait_ends_at_once_or_in_time() {
        let begun = Instant::now();
        assert!(short_wait(|| true));
        // Without a slow yield it takes `LONGEST`, else a time slice of the system.
        short_wait(|| false);
        assert!(begun.elapsed() < Duration::from_secs(1));
    }
}
