//! The learning rate as a function of the step: a linear warm-up, then half a cosine down.

use std::f64::consts::PI;

/// Warm-up to `peak` within `warm_up` steps, then a cosine that reaches `floor` at the last of `steps`
/// (Loshchilov and Hutter, "SGDR", 2017, without restarts).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Schedule {
    /// The highest rate.
    pub(crate) peak: f64,
    /// The rate of the last step.
    pub(crate) floor: f64,
    /// Steps before the peak is reached.
    pub(crate) warm_up: usize,
    /// Steps of the whole run.
    pub(crate) steps: usize,
}

impl Schedule {
    /// For a run of `steps`: a tenth of them warms up, at most 100, and the rate ends at a tenth of `peak`.
    pub(crate) fn new(peak: f64, steps: usize) -> Self {
        Self { peak, floor: peak / 10.0, warm_up: (steps / 10).min(100), steps }
    }

    /// The rate of a step, counted from 0; `floor` after the last.
    pub(crate) fn at(&self, step: usize) -> f64 {
        if step < self.warm_up {
            return self.peak * (step + 1) as f64 / (self.warm_up + 1) as f64;
        }
        let way = self.steps.saturating_sub(self.warm_up + 1).max(1);
        let share = ((step - self.warm_up) as f64 / way as f64).min(1.0);
        // libm's cosine rounds alike on every platform; the standard library's need not.
        self.floor + (self.peak - self.floor) * 0.5 * (1.0 + libm::cos(PI * share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_to_the_peak_and_falls_to_the_floor() {
        let schedule = Schedule::new(1e-3, 200);
        let rates: Vec<f64> = (0..200).map(|step| schedule.at(step)).collect();
        assert!(rates[0] > 0.0 && rates[0] < 1e-4, "{}", rates[0]);
        assert!(rates[..=20].windows(2).all(|pair| pair[0] < pair[1]));
        assert!(rates[20..].windows(2).all(|pair| pair[0] > pair[1]));
        assert_eq!((rates[20], rates[199]), (1e-3, 1e-4));
        assert_eq!(schedule.at(1_000_000), 1e-4);
    }

    #[test]
    fn the_middle_of_the_cosine_is_the_mean_of_both_ends() {
        let schedule = Schedule { peak: 3.0, floor: 1.0, warm_up: 0, steps: 101 };
        assert!((schedule.at(50) - 2.0).abs() < 1e-12);
    }

    #[test]
    fn very_short_runs_have_a_rate_for_every_step() {
        for steps in 1..=12 {
            let schedule = Schedule::new(1e-3, steps);
            assert!((0..steps).all(|step| (1e-4..=1e-3).contains(&schedule.at(step))), "{steps} steps");
        }
    }
}
