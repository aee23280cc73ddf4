//! What the workers of one training measured, combined: times of steps, and the curve of held-out losses.

use std::fmt;

use anyhow::{Context as _, Result, bail, ensure};

use super::fleet::Fleet;
use super::worker::{Answer, Command};
use crate::local::timed::{Case, Timed};

/// Rate of a link in megabits per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate(pub(super) u64);

impl Rate {
    pub(super) fn bits(self) -> u64 {
        self.0 * 1_000_000
    }

    pub(super) fn bytes(self) -> f64 {
        self.bits() as f64 / 8.0
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            rate if rate.is_multiple_of(1000) => write!(f, "{} Gbit/s", rate / 1000),
            rate => write!(f, "{rate} Mbit/s"),
        }
    }
}

/// Measurements of all workers of one training.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) workers: Vec<Timed>,
    /// Bytes over all links, with those before the first step.
    pub(super) crossed: u64,
}

impl Measured {
    /// Trains once.
    pub(super) fn take(fleet: &mut Fleet, case: &Case) -> Result<Self> {
        let done = fleet.run(&Command::Train(case.clone()))?;
        let timed = |answer| match answer {
            Answer::Trained(timed) => Ok(timed),
            other => bail!("a worker answered {other:?} to a training"),
        };
        let workers = done.answers.into_iter().map(timed).collect::<Result<Vec<_>>>()?;
        Ok(Measured { workers, crossed: done.crossed.iter().sum() })
    }

    /// Returns the bytes that the plan says, of all workers.
    pub(super) fn planned(&self) -> u64 {
        self.workers.iter().map(|timed| timed.planned).sum()
    }

    /// Returns the number of measured steps.
    pub(super) fn steps(&self) -> usize {
        self.workers.iter().map(|timed| timed.seconds.len()).min().unwrap_or(0)
    }

    /// Returns the seconds until the slowest worker has taken `step` steps. Steps beyond the measured ones take as long as these: they
    /// must be whole periods.
    pub(super) fn seconds_at(&self, step: f64) -> f64 {
        let steps = self.steps();
        if steps == 0 {
            return f64::NAN;
        }
        let (whole, rest) = ((step / steps as f64).floor(), step % steps as f64);
        whole * self.after(steps) + self.within(rest)
    }

    /// Returns the seconds after a number of measured steps.
    fn after(&self, steps: usize) -> f64 {
        let of = |timed: &Timed| steps.checked_sub(1).map_or(0.0, |last| timed.seconds[last]);
        self.workers.iter().map(of).fold(0.0, f64::max)
    }

    fn within(&self, step: f64) -> f64 {
        let (low, share) = (step as usize, step.fract());
        let next = if share > 0.0 { low + 1 } else { low };
        self.after(low) + share * (self.after(next) - self.after(low))
    }

    /// Checks that another run of the same training took the same first steps, to the bit.
    pub(super) fn begins_with(&self, other: &Measured) -> Result<()> {
        for (worker, (a, b)) in self.workers.iter().zip(&other.workers).enumerate() {
            let same = a.losses.iter().zip(&b.losses).position(|(a, b)| a.to_bits() != b.to_bits());
            ensure!(
                same.is_none() && b.losses.len() <= a.losses.len(),
                "worker {worker} has another loss in step {same:?} at another rate; the collectives differ"
            );
        }
        Ok(())
    }
}

/// Held-out losses by number of steps.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Curve(pub(super) Vec<(u64, f64)>);

impl Curve {
    /// Returns the means over the workers.
    pub(super) fn of(workers: &[Timed]) -> Result<Self> {
        let first = workers.first().context("there is no worker")?;
        let mean = |(i, &(step, _)): (usize, &(u64, f64))| -> Result<(u64, f64)> {
            let losses = workers.iter().map(|timed| timed.held_out.get(i).filter(|(at, _)| *at == step));
            let losses: Option<Vec<f64>> = losses.map(|found| found.map(|(_, loss)| *loss)).collect();
            let losses =
                losses.with_context(|| format!("a worker has no held-out loss after step {step}"))?;
            Ok((step, losses.iter().sum::<f64>() / losses.len() as f64))
        };
        let points = first.held_out.iter().enumerate().map(mean).collect::<Result<Vec<_>>>()?;
        ensure!(!points.is_empty(), "no held-out loss was measured");
        Ok(Curve(points))
    }

    /// Returns the loss after the last step.
    pub(super) fn last(&self) -> f64 {
        self.0.last().map_or(f64::NAN, |(_, loss)| *loss)
    }

    /// Returns the number of steps after which the loss is `target` for the first time; `None` if it never is.
    pub(super) fn step_of(&self, target: f64) -> Option<f64> {
        let below = self.0.iter().position(|(_, loss)| *loss <= target)?;
        let (step, loss) = self.0[below];
        // Before the first measurement nothing is known.
        let Some(&(before, above)) = below.checked_sub(1).and_then(|i| self.0.get(i)) else {
            return Some(step as f64);
        };
        Some(before as f64 + (step - before) as f64 * (above - target) / (above - loss))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measurements of workers with these seconds after each step.
    fn measured(seconds: &[&[f64]]) -> Measured {
        let timed = |seconds: &&[f64]| Timed {
            seconds: seconds.to_vec(),
            losses: seconds.iter().map(|s| 9.0 - s).collect(),
            held_out: Vec::new(),
            sent: 0,
            planned: 100,
            digest: String::new(),
        };
        Measured { workers: seconds.iter().map(timed).collect(), crossed: 0 }
    }

    #[test]
    fn the_slowest_worker_counts_and_steps_beyond_the_measured_ones_repeat_them() {
        let measured = measured(&[&[1.0, 2.0, 6.0, 7.0], &[2.0, 3.0, 5.0, 7.5]]);
        let at = |step: f64| measured.seconds_at(step);
        assert_eq!([at(0.0), at(1.0), at(2.5), at(3.0), at(4.0)], [0.0, 2.0, 4.5, 6.0, 7.5]);
        assert_eq!([at(5.0), at(8.0), at(9.5)], [9.5, 15.0, 17.5]);
    }

    #[test]
    fn a_loss_is_reached_between_two_measurements() {
        let curve = Curve(vec![(10, 4.0), (20, 3.0), (30, 3.2), (40, 2.0)]);
        assert_eq!(curve.step_of(3.5), Some(15.0));
        assert_eq!((curve.step_of(3.0), curve.step_of(4.5)), (Some(20.0), Some(10.0)));
        assert_eq!((curve.step_of(2.6), curve.step_of(1.9)), (Some(35.0), None));
    }

    #[test]
    fn another_loss_at_another_rate_is_an_error() {
        let whole = measured(&[&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]]);
        assert!(whole.begins_with(&measured(&[&[1.0, 2.0], &[1.0, 2.0]])).is_ok());
        let error = whole.begins_with(&measured(&[&[1.0, 2.0], &[1.0, 2.5]])).unwrap_err().to_string();
        assert!(error.contains("worker 1"), "{error}");
        assert!(measured(&[&[1.0]]).begins_with(&whole).is_err());
    }
}
