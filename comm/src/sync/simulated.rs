//! Inside a shuttle execution its primitives, outside of one the standard library's: so the feature changes nothing for
//! code that shuttle does not run.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::time::Duration;

fn simulating() -> bool {
    shuttle::current::try_get_current_task().is_some()
}

#[derive(Debug)]
pub(crate) enum Mutex<T> {
    Std(std::sync::Mutex<T>),
    Shuttle(shuttle::sync::Mutex<T>),
}

pub(crate) enum Guard<'a, T> {
    Std(std::sync::MutexGuard<'a, T>),
    Shuttle(shuttle::sync::MutexGuard<'a, T>),
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        if simulating() {
            Mutex::Shuttle(shuttle::sync::Mutex::new(value))
        } else {
            Mutex::Std(std::sync::Mutex::new(value))
        }
    }

    pub(crate) fn lock(&self) -> Guard<'_, T> {
        match self {
            Mutex::Std(mutex) => Guard::Std(mutex.lock().unwrap_or_else(PoisonError::into_inner)),
            Mutex::Shuttle(mutex) => Guard::Shuttle(mutex.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Guard::Std(guard) => guard,
            Guard::Shuttle(guard) => guard,
        }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Guard::Std(guard) => guard,
            Guard::Shuttle(guard) => guard,
        }
    }
}

#[derive(Debug)]
pub(crate) enum Condvar {
    Std(std::sync::Condvar),
    Shuttle(shuttle::sync::Condvar),
}

impl Condvar {
    pub(crate) fn new() -> Self {
        if simulating() {
            Condvar::Shuttle(shuttle::sync::Condvar::new())
        } else {
            Condvar::Std(std::sync::Condvar::new())
        }
    }

    pub(crate) fn notify_all(&self) {
        match self {
            Condvar::Std(condvar) => condvar.notify_all(),
            Condvar::Shuttle(condvar) => condvar.notify_all(),
        }
    }

    /// Waits for a notification, or for `timeout` where there is one; may also wake for no reason. Shuttle has no
    /// time, so inside it only a manual clock's advance ends a wait early.
    pub(crate) fn wait<'a, T>(&self, guard: Guard<'a, T>, timeout: Option<Duration>) -> Guard<'a, T> {
        match (self, guard) {
            (Condvar::Std(condvar), Guard::Std(guard)) => Guard::Std(match timeout {
                None => condvar.wait(guard).unwrap_or_else(PoisonError::into_inner),
                Some(timeout) => {
                    condvar.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner).0
                }
            }),
            (Condvar::Shuttle(condvar), Guard::Shuttle(guard)) => {
                Guard::Shuttle(condvar.wait(guard).unwrap_or_else(PoisonError::into_inner))
            }
            _ => panic!("a communicator made inside shuttle is used outside of it, or the other way round"),
        }
    }
}

/// A thread of its own that nobody waits for.
pub(crate) fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    if simulating() {
        return shuttle::thread::Builder::new().name(name).spawn(body).map(drop);
    }
    std::thread::Builder::new().name(name).spawn(body).map(drop)
}

/// `body` on every item, each on a thread of its own; returns when all have ended. `body` must not panic. Where the
/// system gives no thread, the item is dropped.
pub(crate) fn on_threads<I: Send, T: Send>(
    items: Vec<I>,
    body: impl Fn(I) -> T + Sync,
) -> Vec<io::Result<T>> {
    let body = &body;
    let panicked = |_| io::Error::other("it panicked");
    if simulating() {
        return shuttle::thread::scope(|scope| {
            let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(move || body(item))).collect();
            threads.into_iter().map(|thread| thread.join().map_err(panicked)).collect()
        });
    }
    std::thread::scope(|scope| {
        let start = |item| std::thread::Builder::new().spawn_scoped(scope, move || body(item));
        let threads: Vec<_> = items.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread?.join().map_err(panicked)).collect()
    })
}
