//! Shuttle's primitives inside a shuttle execution, the real ones outside, so that the feature changes nothing for code that
//! shuttle does not run.

use super::real;
use shuttle::sync::atomic::AtomicU32;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

fn simulating() -> bool {
    shuttle::current::try_get_current_task().is_some()
}

#[derive(Debug)]
pub(crate) enum Mutex<T> {
    Real(real::Mutex<T>),
    Shuttle(shuttle::sync::Mutex<T>),
}

pub(crate) enum Guard<'a, T> {
    Real(real::Guard<'a, T>),
    Shuttle { inner: shuttle::sync::MutexGuard<'a, T>, of: &'a Mutex<T> },
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        if simulating() {
            Mutex::Shuttle(shuttle::sync::Mutex::new(value))
        } else {
            Mutex::Real(real::Mutex::new(value))
        }
    }

    pub(crate) fn lock(&self) -> Guard<'_, T> {
        match self {
            Mutex::Real(mutex) => Guard::Real(mutex.lock()),
            Mutex::Shuttle(mutex) => {
                Guard::Shuttle { inner: mutex.lock().unwrap_or_else(PoisonError::into_inner), of: self }
            }
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
            Guard::Real(guard) => guard,
            Guard::Shuttle { inner, .. } => inner,
        }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Guard::Real(guard) => guard,
            Guard::Shuttle { inner, .. } => inner,
        }
    }
}

#[derive(Debug)]
pub(crate) enum Condvar {
    Real(real::Condvar),
    /// With the number of notifications.
    Shuttle(shuttle::sync::Condvar, AtomicU32),
}

impl Condvar {
    pub(crate) fn new() -> Self {
        if simulating() {
            Condvar::Shuttle(shuttle::sync::Condvar::new(), AtomicU32::new(0))
        } else {
            Condvar::Real(real::Condvar::new())
        }
    }

    pub(crate) fn notify_all(&self) {
        match self {
            Condvar::Real(condvar) => condvar.notify_all(),
            Condvar::Shuttle(condvar, rung) => {
                rung.fetch_add(1, SeqCst);
                condvar.notify_all();
            }
        }
    }

    /// Waits for a notification, or at most `timeout`; may also wake spuriously. Shuttle has no time, so inside it only a manual
    /// clock's advance ends a wait early.
    pub(crate) fn wait<'a, T>(&self, guard: Guard<'a, T>, timeout: Option<Duration>) -> Guard<'a, T> {
        match (self, guard) {
            (Condvar::Real(condvar), Guard::Real(guard)) => Guard::Real(condvar.wait(guard, timeout)),
            (Condvar::Shuttle(condvar, _), Guard::Shuttle { inner, of }) => {
                Guard::Shuttle { inner: condvar.wait(inner).unwrap_or_else(PoisonError::into_inner), of }
            }
            _ => {
                panic!("a communicator made inside a shuttle execution is used outside of it, or vice versa")
            }
        }
    }

    /// Like [`wait`](Condvar::wait), for a notification that is expected in microseconds. As in [`real::Condvar::wait_awake`], every other
    /// wait only lets other threads run, without the mutex.
    pub(crate) fn wait_awake<'a, T>(
        &self,
        guard: Guard<'a, T>,
        timeout: Option<Duration>,
        tired: &mut bool,
    ) -> Guard<'a, T> {
        match (self, guard) {
            (Condvar::Real(condvar), Guard::Real(guard)) => {
                Guard::Real(condvar.wait_awake(guard, timeout, tired))
            }
            (Condvar::Shuttle(_, rung), Guard::Shuttle { inner, of }) if !std::mem::take(tired) => {
                let seen = rung.load(SeqCst);
                drop(inner);
                shuttle::thread::yield_now();
                *tired = rung.load(SeqCst) == seen;
                of.lock()
            }
            (condvar, guard) => condvar.wait(guard, timeout),
        }
    }
}

/// Counter that gives each number to one caller only. Inside shuttle another thread may run before each draw.
#[derive(Debug)]
pub(crate) enum Counter {
    Real(real::Counter),
    Shuttle(shuttle::sync::atomic::AtomicUsize),
}

impl Counter {
    pub(crate) fn new() -> Self {
        if simulating() {
            Counter::Shuttle(shuttle::sync::atomic::AtomicUsize::new(0))
        } else {
            Counter::Real(real::Counter::new())
        }
    }

    pub(crate) fn next(&self) -> usize {
        match self {
            Counter::Real(counter) => counter.next(),
            Counter::Shuttle(counter) => counter.fetch_add(1, SeqCst),
        }
    }

    pub(crate) fn reset(&self) {
        match self {
            Counter::Real(counter) => counter.reset(),
            Counter::Shuttle(counter) => counter.store(0, SeqCst),
        }
    }
}

/// Starts a detached thread.
pub(crate) fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    if simulating() {
        return shuttle::thread::Builder::new().name(name).spawn(body).map(drop);
    }
    real::spawn(name, body)
}

/// Runs `body` on every item, each on its own thread; returns when all have ended. `body` must not panic.
pub(crate) fn on_threads<I: Send, T: Send>(
    items: Vec<I>,
    body: impl Fn(I) -> T + Sync,
) -> Vec<io::Result<T>> {
    if !simulating() {
        return real::on_threads(items, body);
    }
    let body = &body;
    shuttle::thread::scope(|scope| {
        let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(move || body(item))).collect();
        let join = |thread: shuttle::thread::ScopedJoinHandle<'_, T>| thread.join();
        threads.into_iter().map(|thread| join(thread).map_err(|_| io::Error::other("it panicked"))).collect()
    })
}
