//! Calls under a deadline: the caller continues even if a call never returns.

use crate::Clock;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// Poll interval of a manual clock.
const LOOK: Duration = Duration::from_millis(1);

/// Runs each work item on its own thread and returns the results that arrive in time; the other threads keep running detached.
pub(super) fn run<T: Send + 'static>(
    clock: &Clock,
    within: Duration,
    works: Vec<impl FnOnce() -> T + Send + 'static>,
) -> Vec<T> {
    let end = clock.now().saturating_add(within);
    let (tell, told) = channel();
    let mut results = Vec::with_capacity(works.len());
    let count = works.len();
    for work in works {
        let tell = tell.clone();
        // If the system gives no thread, the result is missing at the deadline. After the deadline a send fails, as the receiver
        // is gone.
        let _ = thread::Builder::new().spawn(move || drop(tell.send(work())));
    }
    drop(tell);
    while results.len() < count && clock.now() < end {
        match told.recv_timeout(LOOK) {
            Ok(result) => results.push(result),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Barrier};

    #[test]
    fn late_work_is_left_behind() {
        let (clock, gate) = (Clock::manual(), Arc::new(Barrier::new(2)));
        let (moved, held) = (clock.clone(), Arc::clone(&gate));
        let works: Vec<Box<dyn FnOnce() -> u32 + Send>> = vec![
            Box::new(|| 7),
            Box::new(move || {
                moved.advance(Duration::from_secs(5));
                held.wait();
                8
            }),
        ];
        let results = run(&clock, Duration::from_secs(5), works);
        assert!(!results.contains(&8), "{results:?}");
        gate.wait();
        assert_eq!(run(&clock, Duration::from_secs(5), vec![|| 1, || 1]), [1, 1]);
    }
}
