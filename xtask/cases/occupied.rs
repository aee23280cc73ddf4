//! Rayon's global pool, occupied: work that is no business of the pool must not notice.

use std::sync::mpsc::{channel, sync_channel};
use std::time::{Duration, Instant};

/// Time for which a job occupies its thread unless it is released before: a caller's long job.
const LONG: Duration = Duration::from_secs(10);

/// Runs `work` while every thread of rayon's global pool sleeps in a job.
pub fn while_rayon_is_full<T>(work: impl FnOnce() -> T) -> T {
    let threads = rayon::current_num_threads();
    let ((at_work, working), (release, released)) = (channel(), sync_channel::<()>(0));
    let released = std::sync::Arc::new(std::sync::Mutex::new(released));
    let end = Instant::now() + LONG;
    rayon::spawn_broadcast(move |_| {
        at_work.send(()).unwrap();
        // The sender is dropped when the work is done, which ends every wait.
        let _ = released.lock().unwrap().recv_timeout(end.saturating_duration_since(Instant::now()));
    });
    (0..threads).for_each(|_| working.recv().unwrap());
    let result = work();
    drop(release);
    result
}

/// Returns how much longer the shortest of `rounds` runs of `work` takes while rayon's global pool is full. Other work of the machine
/// lengthens some runs, a wait for the pool all of them.
pub fn delay_by_full_rayon(rounds: usize, mut work: impl FnMut()) -> Duration {
    let mut timed = || {
        let start = Instant::now();
        work();
        start.elapsed()
    };
    timed(); // starts threads
    // In turns, so that both meet the same other work.
    let turns: Vec<_> = (0..rounds).map(|_| [timed(), while_rayon_is_full(&mut timed)]).collect();
    let [free, full] = [0, 1].map(|which| turns.iter().map(|turn| turn[which]).min().unwrap_or_default());
    full.saturating_sub(free)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_of_the_pool_notices() {
        let (sent, arrived) = channel();
        while_rayon_is_full(|| {
            rayon::spawn(move || sent.send(()).unwrap());
            assert!(arrived.recv_timeout(Duration::from_millis(200)).is_err());
        });
        arrived.recv().unwrap();
    }
}
