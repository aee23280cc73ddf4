//! The time for all cases of a benchmark.

use std::time::{Duration, Instant};

/// The time for all rows.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    seconds: Option<f64>,
    begun: Instant,
    /// The longest that a row has taken.
    longest: Duration,
}

impl Budget {
    /// Begins now. None: no limit.
    pub fn new(seconds: Option<f64>) -> Self {
        Budget { seconds, begun: Instant::now(), longest: Duration::ZERO }
    }

    /// Notes how long a row has taken.
    pub fn took(&mut self, time: Duration) {
        self.longest = self.longest.max(time);
    }

    /// Why no other row begins: another one as long as the longest would not end in time.
    pub fn over(&self) -> Option<String> {
        let seconds = self.seconds?;
        let expected = (self.begun.elapsed() + self.longest).as_secs_f64();
        (expected > seconds).then(|| format!("the budget of {seconds} s is over; GPU_BENCH_SECONDS sets it"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_counts_the_row_to_come() {
        assert_eq!(Budget::new(None).over(), None);
        let mut budget = Budget::new(Some(100.0));
        budget.took(Duration::from_secs(60));
        assert_eq!(budget.over(), None);
        budget.took(Duration::from_secs(200));
        budget.took(Duration::from_secs(1));
        assert!(budget.over().unwrap().contains("the budget of 100 s is over"));
    }
}
