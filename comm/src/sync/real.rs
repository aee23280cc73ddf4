//! The standard library's primitives without lock poisoning: ranks handle panics, not locks.

use super::yields;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::time::Duration;

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

/// Lock of a mutex. It knows the mutex, so that a wait can take it again.
pub(crate) struct Guard<'a, T> {
    inner: std::sync::MutexGuard<'a, T>,
    of: &'a Mutex<T>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Mutex(std::sync::Mutex::new(value))
    }

    pub(crate) const fn fixed(value: T) -> Self {
        Mutex(std::sync::Mutex::new(value))
    }

    /// Returns the lock unless another thread has it.
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        let inner = match self.0.try_lock() {
            Ok(inner) => inner,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => return None,
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
    inner: std::sync::Condvar,
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

/// Counter that gives each number to one caller only.
#[derive(Debug)]
pub(crate) struct Counter(AtomicUsize);

impl Counter {
    pub(crate) fn new() -> Self {
        Counter(AtomicUsize::new(0))
    }

    pub(crate) fn next(&self) -> usize {
        self.0.fetch_add(1, Relaxed)
    }

    pub(crate) fn reset(&self) {
        self.0.store(0, Relaxed);
    }
}

/// Starts a detached thread.
pub(crate) fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name).spawn(body).map(drop)
}

/// Runs `body` on every item, each on its own thread; returns when all have ended. `body` must not panic. If the system gives no
/// thread, the item is dropped.
pub(crate) fn on_threads<I: Send, T: Send>(
    items: Vec<I>,
    body: impl Fn(I) -> T + Sync,
) -> Vec<io::Result<T>> {
    let body = &body;
    std::thread::scope(|scope| {
        let start = |(i, item)| {
            let thread = std::thread::Builder::new().name(format!("rank {i}"));
            thread.spawn_scoped(scope, move || body(item))
        };
        let threads: Vec<_> = items.into_iter().enumerate().map(start).collect();
        threads
            .into_iter()
            .map(|thread| thread?.join().map_err(|_| io::Error::other("it panicked")))
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Threads that take turns: a notification that is lost between a look at the state and a sleep would end this test by its time.
    #[test]
    fn no_notification_is_lost_between_yields_and_sleeps() {
        const TURNS: u32 = 30_000;
        for threads in [2, 3] {
            let shared = Arc::new((Mutex::new(0u32), Condvar::new()));
            let take_turns = |me: u32| {
                let shared = Arc::clone(&shared);
                move || {
                    let (turn, changed) = &*shared;
                    let mut tired = false;
                    let mut now = turn.lock();
                    while *now < TURNS {
                        if *now % threads == me {
                            *now += 1;
                            drop(now);
                            // After the lock, as the callers do.
                            changed.notify_all();
                            now = turn.lock();
                        } else {
                            now = changed.wait_awake(now, None, &mut tired);
                        }
                    }
                }
            };
            let running: Vec<_> = (0..threads).map(|me| std::thread::spawn(take_turns(me))).collect();
            running.into_iter().for_each(|thread| thread.join().unwrap());
        }
    }
}
