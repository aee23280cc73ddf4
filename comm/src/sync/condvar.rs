//! Mutex without poisoning, and a condition variable that costs no system call without a sleeping thread.
//!
//! The state under the mutex carries the proof, and the counters only spare work: a thread counts itself asleep under the mutex, before it
//! gives the mutex away, so a notification after a change either finds it counted or its look at the state has seen the change.
//! `model` runs this file on loom's primitives.

use super::{primitives, yields};
use Ordering::{Acquire, Relaxed, Release, SeqCst};
use primitives::{AtomicU32, Ordering};
use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

/// Mutex that a panic does not poison: a panic ends the rank's operations by [`Error::Panicked`](crate::Error::Panicked), and every change
/// of the state under a lock is complete before code of a caller can run.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(pub(super) primitives::Mutex<T>);

/// Lock of a mutex. It knows the mutex, so that a wait can take it again.
pub(crate) struct Guard<'a, T> {
    inner: primitives::MutexGuard<'a, T>,
    of: &'a Mutex<T>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Mutex(primitives::Mutex::new(value))
    }

    /// Returns the lock unless another thread has it.
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        let inner = match self.0.try_lock() {
            Ok(inner) => inner,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Guard { inner, of: self })
    }

    pub(crate) fn lock(&self) -> Guard<'_, T> {
        Guard { inner: self.0.lock().unwrap_or_else(PoisonError::into_inner), of: self }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// Condition variable of state behind one mutex. A notification follows a change made under that mutex; without a sleeping thread it
/// needs no system call.
#[derive(Debug, Default)]
pub(crate) struct Condvar {
    inner: primitives::Condvar,
    /// Number of notifications.
    rung: AtomicU32,
    /// Number of threads that sleep, or are about to with the mutex still locked.
    asleep: AtomicU32,
}

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn notify_all(&self) {
        self.rung.fetch_add(1, Release);
        // A thread that sleeps has counted itself under the mutex, before the change that this notifies of.
        if self.asleep.load(SeqCst) > 0 {
            self.inner.notify_all();
        }
    }

    /// Sleeps until a notification, or at most `timeout`; may also wake spuriously.
    pub(crate) fn wait<'a, T>(&self, guard: Guard<'a, T>, timeout: Option<Duration>) -> Guard<'a, T> {
        let Guard { inner, of } = guard;
        self.asleep.fetch_add(1, SeqCst);
        let inner = match timeout {
            None => self.inner.wait(inner).unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => {
                self.inner.wait_timeout(inner, timeout).unwrap_or_else(PoisonError::into_inner).0
            }
        };
        self.asleep.fetch_sub(1, SeqCst);
        Guard { inner, of }
    }

    /// Like [`wait`](Condvar::wait), for a notification that is expected in microseconds: gives the processor away for a short time
    /// without the mutex, and sleeps in the next wait if nothing was notified. So the caller looks at the state in between, as a
    /// change may come before its notification.
    pub(crate) fn wait_awake<'a, T>(
        &self,
        guard: Guard<'a, T>,
        timeout: Option<Duration>,
        tired: &mut bool,
    ) -> Guard<'a, T> {
        if std::mem::take(tired) {
            return self.wait(guard, timeout);
        }
        // Read under the mutex: the notification of a change that this thread has not seen is not counted yet.
        let (seen, of) = (self.rung.load(Relaxed), guard.of);
        drop(guard);
        yields::until(|| self.rung.load(Acquire) != seen);
        *tired = self.rung.load(Relaxed) == seen;
        of.lock()
    }
}
