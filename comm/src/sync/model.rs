//! The condition variable on loom's primitives: all orders of steps of two threads, and all values that a load may return.

mod primitives {
    pub(super) use loom::sync::atomic::{AtomicU32, Ordering};
    pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};
}

/// A short wait: one look, and one more after another thread had the processor.
mod yields {
    pub(super) fn until(mut is_over: impl FnMut() -> bool) {
        if !is_over() {
            loom::thread::yield_now();
            is_over();
        }
    }
}

#[allow(clippy::duplicate_mod, dead_code, reason = "the models need no `try_lock`")]
#[path = "condvar.rs"]
mod condvar;

use condvar::{Condvar, Mutex};
use loom::sync::Arc;
use loom::thread;
use std::time::Duration;

/// Waits until the state is at least `until`, as the loops of lanes and meetings do.
fn wait_for((state, changed): &(Mutex<u32>, Condvar), until: u32, timeout: Option<Duration>) {
    let (mut state, mut tired) = (state.lock(), false);
    while *state < until {
        state = changed.wait_awake(state, timeout, &mut tired);
    }
}

fn add((state, changed): &(Mutex<u32>, Condvar)) {
    *state.lock() += 1;
    // After the lock, as the callers do.
    changed.notify_all();
}

/// Every wait ends: loom reports a thread that sleeps for ever as a deadlock.
#[test]
fn no_order_of_steps_loses_a_notification() {
    for timeout in [None, Some(Duration::from_secs(1))] {
        loom::model(move || {
            let shared = Arc::new((Mutex::new(0), Condvar::new()));
            let other = Arc::clone(&shared);
            let other = thread::spawn(move || add(&other));
            wait_for(&shared, 1, timeout);
            other.join().unwrap();
        });
    }
}

#[test]
fn two_threads_wait_for_each_other() {
    loom::model(|| {
        let shared = Arc::new((Mutex::new(0), Condvar::new()));
        let other = Arc::clone(&shared);
        let other = thread::spawn(move || {
            add(&other);
            wait_for(&other, 2, None);
        });
        wait_for(&shared, 1, None);
        add(&shared);
        other.join().unwrap();
    });
}

/// Several waiters, one notification: nobody is left asleep.
#[test]
fn one_notification_wakes_all() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let shared = Arc::new((Mutex::new(0), Condvar::new()));
        let waiters = [0, 1].map(|_| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || wait_for(&shared, 1, None))
        });
        add(&shared);
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    });
}
