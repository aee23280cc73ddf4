//! Time budget for all cases of a benchmark.

use std::time::{Duration, Instant};

/// Time budget for all rows.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    seconds: Option<f64>,
    begun: Instant,
    /// Time of the slowest row so far.
    longest: Duration,
}

impl Budget {
    /// Starts the budget now. `None` means no limit.
    pub fn new(seconds: Option<f64>) -> Self {
        Budget { seconds, begun: Instant::now(), longest: Duration::ZERO }
    }

    /// Records the time of a row.
    pub fn took(&mut self, time: Duration) {
        self.longest = self.longest.max(time);
    }

    /// Returns the reason if no further row may begin: a row as long as the slowest so far would exceed the budget.
    pub fn over(&self) -> Option<String> {
        let seconds = self.seconds?;
        let expected = (self.begun.elapsed() + self.longest).as_secs_f64();
        (expected > seconds)
            .then(|| format!("the budget of {seconds} s is used up; GPU_BENCH_SECONDS sets it"))
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
        assert!(budget.over().unwrap().contains("the budget of 100 s is used up"));
    }
}
