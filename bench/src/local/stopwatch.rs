//! Clock of a training that stands still while something else is measured.

use std::time::{Duration, Instant};

/// The clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stopwatch {
    start: Instant,
    paused: Duration,
}

impl Stopwatch {
    /// Starts at 0.
    pub(super) fn start() -> Self {
        Stopwatch { start: Instant::now(), paused: Duration::ZERO }
    }

    /// Returns the seconds since the start, without pauses.
    pub(super) fn seconds(&self) -> f64 {
        self.start.elapsed().saturating_sub(self.paused).as_secs_f64()
    }

    /// Does something that takes no time on this clock.
    pub(super) fn pause<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let done = work();
        self.paused += begin.elapsed();
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_do_not_count_and_the_rest_does() {
        let sleep = || std::thread::sleep(Duration::from_millis(30));
        let (whole, mut watch) = (Instant::now(), Stopwatch::start());
        sleep();
        watch.pause(sleep);
        let (seconds, whole) = (watch.seconds(), whole.elapsed().as_secs_f64());
        assert!(seconds >= 0.03 && seconds <= whole - 0.03, "{seconds} of {whole}");
    }
}
