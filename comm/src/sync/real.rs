//! The standard library's primitives without lock poisoning: ranks handle panics, not locks.

use std::io;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

pub(crate) use std::sync::MutexGuard as Guard;

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Mutex(std::sync::Mutex::new(value))
    }

    pub(crate) const fn fixed(value: T) -> Self {
        Mutex(std::sync::Mutex::new(value))
    }

    /// Returns the lock unless another thread has it.
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }

    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Condvar(std::sync::Condvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Waits for a notification, or at most `timeout`; may also wake spuriously.
    pub(crate) fn wait<'a, T>(&self, guard: Guard<'a, T>, timeout: Option<Duration>) -> Guard<'a, T> {
        match timeout {
            None => self.0.wait(guard).unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => self.0.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner).0,
        }
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
