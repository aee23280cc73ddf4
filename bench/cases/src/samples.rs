//! Samples taken in turns, with their median and its confidence interval.

use serde::{Deserialize, Serialize};

/// One number per round, in the order of the rounds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples(Vec<f64>);

/// Median of `rounds` rounds, and its 95 % confidence interval. With fewer than six rounds no such interval exists; then
/// the interval is the range of all samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Median {
    pub median: f64,
    pub low: f64,
    pub high: f64,
    pub rounds: usize,
}

impl Samples {
    pub fn push(&mut self, sample: f64) {
        self.0.push(sample);
    }

    /// Returns the ratio of this to `other` in each round; a disturbance of a round affects both.
    pub fn over(&self, other: &Samples) -> Samples {
        Samples(self.0.iter().zip(&other.0).map(|(own, other)| own / other).collect())
    }

    /// Returns the sum of both samples in each round.
    pub fn plus(&self, other: &Samples) -> Samples {
        Samples(self.0.iter().zip(&other.0).map(|(own, other)| own + other).collect())
    }

    /// Returns this sample less the other one in each round.
    pub fn less(&self, other: &Samples) -> Samples {
        Samples(self.0.iter().zip(&other.0).map(|(own, other)| own - other).collect())
    }

    /// Returns the larger of both samples in each round.
    pub fn largest(&self, other: &Samples) -> Samples {
        Samples(self.0.iter().zip(&other.0).map(|(own, other)| own.max(*other)).collect())
    }

    /// Returns each sample times `factor`.
    pub fn times(&self, factor: f64) -> Samples {
        Samples(self.0.iter().map(|sample| sample * factor).collect())
    }

    /// Returns each sample minus `other`.
    pub fn minus(&self, other: f64) -> Samples {
        Samples(self.0.iter().map(|sample| sample - other).collect())
    }

    /// Returns the median and its interval; all NaN without samples.
    pub fn median(&self) -> Median {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rounds = sorted.len();
        let at = |i: usize| sorted.get(i).copied().unwrap_or(f64::NAN);
        let beyond = beyond(rounds);
        let last = rounds.saturating_sub(1);
        Median {
            median: (at(last / 2) + at(rounds / 2)) / 2.0,
            low: at(beyond),
            high: at(last.saturating_sub(beyond)),
            rounds,
        }
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(samples: I) -> Self {
        Samples(samples.into_iter().collect())
    }
}

/// Returns the number of `n` sorted samples beyond either end of the interval: the largest number with a chance of at most
/// 2.5 % that the median lies beyond this end (the sign test).
fn beyond(n: usize) -> usize {
    // Probability that at most k of n samples lie below the median.
    let (mut chance, mut below) = (0.5f64.powi(n as i32), 0.0);
    for k in 0..n {
        below += chance;
        if below > 0.025 {
            return k.saturating_sub(1);
        }
        chance *= (n - k) as f64 / (k + 1) as f64;
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(numbers: &[f64]) -> Samples {
        numbers.iter().copied().collect()
    }

    #[test]
    fn a_median_of_few_spans_all_and_of_many_less() {
        let few = samples(&[3.0, 1.0, 2.0]).median();
        assert_eq!((few.median, few.low, few.high, few.rounds), (2.0, 1.0, 3.0, 3));
        assert_eq!(samples(&[1.0, 2.0, 3.0, 10.0]).median().median, 2.5);
        let many: Samples = (0..21).map(f64::from).collect();
        // From tables of the sign test: 21 samples, the 6th from either end.
        assert_eq!((many.median().low, many.median().high), (5.0, 15.0));
        assert!(Samples::default().median().median.is_nan());
    }

    #[test]
    fn intervals_are_those_of_published_tables() {
        for (n, order) in [(5, 1), (6, 1), (8, 1), (9, 2), (12, 3), (17, 5), (25, 8), (50, 18)] {
            assert_eq!(beyond(n) + 1, order, "{n} samples");
        }
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        let (slow, fast) = (samples(&[2.0, 8.0, 20.0]), samples(&[1.0, 4.0, 2.0]));
        assert_eq!(slow.over(&fast), samples(&[2.0, 2.0, 10.0]));
        assert_eq!(slow.over(&fast).median().median, 2.0);
        assert_eq!(slow.times(0.5), samples(&[1.0, 4.0, 10.0]));
        assert_eq!(slow.plus(&fast).less(&fast), slow);
    }
}
