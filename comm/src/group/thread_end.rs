//! End of a communication thread, for handles that wait for it in their drop.

use crate::sync::real::{Condvar, Mutex};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// End of one thread.
#[derive(Debug, Default)]
pub(crate) struct ThreadEnd {
    is_over: Mutex<bool>,
    over: Condvar,
}

/// Owned by the thread: its drop is the end.
#[derive(Debug)]
pub(crate) struct ThreadGuard(Arc<ThreadEnd>);

impl ThreadEnd {
    /// Returns the end of a thread, and what the thread has to own.
    pub(crate) fn pair() -> (Arc<Self>, ThreadGuard) {
        let end = Arc::<ThreadEnd>::default();
        (Arc::clone(&end), ThreadGuard(end))
    }

    /// Waits until the thread has ended, at most `at_most`.
    pub(crate) fn wait(&self, at_most: Duration) {
        let until = Instant::now().checked_add(at_most);
        let mut is_over = self.is_over.lock();
        while !*is_over {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return;
            }
            is_over = self.over.wait(is_over, left);
        }
    }
}

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        *self.0.is_over.lock() = true;
        self.0.over.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn the_wait_lasts_until_the_guard_is_dropped() {
        let (end, guard) = ThreadEnd::pair();
        let (bounded, dropped) = (Barrier::new(2), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                bounded.wait();
                std::thread::sleep(Duration::from_millis(50));
                dropped.store(true, Ordering::SeqCst);
                drop(guard);
            });
            // This wait has a bound.
            end.wait(Duration::from_millis(1));
            bounded.wait();
            end.wait(Duration::MAX);
            assert!(dropped.load(Ordering::SeqCst));
        });
        // Later waits return at once.
        end.wait(Duration::MAX);
    }
}
