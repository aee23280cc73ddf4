//! The standard library's primitives without lock poisoning: ranks handle panics, not locks.

pub(crate) use super::condvar::{Condvar, Guard, Mutex};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

impl<T> Mutex<T> {
    pub(crate) const fn fixed(value: T) -> Self {
        Mutex(std::sync::Mutex::new(value))
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
