//! One training of `bench network`: described by data, and measured step by step on one worker.

use std::sync::Arc;

use anyhow::{Result, ensure};
use meshstep_comm::Communicator;
use serde::{Deserialize, Serialize};

use super::job::{Common, Job};
use super::method::Method;
use super::schedule::Schedule;
use super::tuning::Tuning;
use super::worker::{self, Done};
use crate::args::local::{Asked, Task};
use crate::corpus::Corpus;
use crate::gpt::Config;
use crate::ranks::bits;
use crate::ranks::progress::Progress;
use crate::train::compare::digest;

/// Description of a training, the same on all workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) method: Task,
    /// Steps between two exchanges of the parameters.
    pub(crate) kx: Option<u64>,
    pub(crate) tuning: Tuning,
    pub(crate) network: Config,
    /// Steps of the learning rate's schedule.
    pub(crate) steps: usize,
    /// Step after which the training ends.
    pub(crate) last: u64,
    /// Sequences per worker and step.
    pub(crate) batch: usize,
    /// Number of sequences for held-out losses.
    pub(crate) held_out: usize,
    /// Number of times that held-out losses are measured, about; 0 is never.
    pub(crate) measured: u64,
    pub(crate) seed: u64,
}

/// Measurements of one worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Timed {
    /// Seconds from the start to the end of each step.
    pub(crate) seconds: Vec<f64>,
    /// Loss of each step.
    #[serde(with = "bits")]
    pub(crate) losses: Vec<f64>,
    /// Held-out losses on the worker's share, with the number of steps.
    #[serde(with = "bits")]
    pub(crate) held_out: Vec<(u64, f64)>,
    /// Bytes that the worker sent, as ring algorithms send them.
    pub(crate) sent: u64,
    /// The same, computed before the training.
    pub(crate) planned: u64,
    /// Digest of the worker's final parameters.
    pub(crate) digest: String,
}

impl Case {
    /// Trains as one worker among the ranks of `world`.
    pub(crate) fn train(&self, text: &[u8], world: Arc<dyn Communicator>) -> Result<Timed> {
        ensure!(self.last <= self.steps as u64, "{} of {} steps", self.last, self.steps);
        let (workers, corpus) = (world.world_size(), Corpus::new(text, self.network.context)?);
        let asked = Asked { kx: self.kx, ..Asked::default() };
        let method = Method::of(self.method, &asked, self.steps as u64)?;
        let common = Common {
            model: self.network,
            corpus: &corpus,
            steps: self.steps,
            batch: self.batch,
            workers,
            held_out: self.held_out,
            marks: &[],
            on_the_way: self.seed,
        };
        let (mut job, _) = Job::new(common, &method, self.seed, Schedule::default())?;
        (job.tuning, job.last) = (self.tuning, self.last);
        job.measure(self.measured);
        // A communicator for each training: its counts begin at 0.
        let rank = world.rank() as i64;
        let own = world.split(Some(0), rank)?.unwrap_or(world);
        Ok(Timed::of(worker::train(&job, own, &Progress::hidden(self.steps))?))
    }
}

impl Timed {
    fn of(done: Done) -> Self {
        let Done { seconds, losses, held_out, total, planned, finals, outer, .. } = done;
        let digest = digest([&finals, &outer]);
        Timed { seconds, losses, held_out, sent: total, planned: planned.unwrap_or(0), digest }
    }
}

#[cfg(test)]
mod tests {
    use meshstep_comm::loopback;

    use super::*;

    fn case(method: Task) -> Case {
        Case {
            method,
            kx: Some(2),
            tuning: Tuning::default(),
            network: Config { layers: 1, heads: 2, width: 16, context: 8 },
            steps: 8,
            last: 8,
            batch: 1,
            held_out: 3,
            measured: 2,
            seed: 1,
        }
    }

    fn train(case: &Case) -> Vec<Timed> {
        let text = include_bytes!("timed.rs");
        loopback::spawn(2, |world| case.train(text, world).unwrap()).unwrap()
    }

    #[test]
    fn a_training_that_ends_early_takes_the_first_steps_of_the_whole_one() {
        for method in [Task::EveryStep, Task::DesLoc] {
            let whole = case(method);
            let part = Case { last: 4, measured: 0, ..whole.clone() };
            for (whole, part) in train(&whole).iter().zip(train(&part)) {
                assert_eq!((whole.losses.len(), whole.seconds.len()), (8, 8));
                assert_eq!(part.losses, whole.losses[..4]);
                assert_eq!(whole.held_out.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [4, 8]);
                assert!(part.held_out.is_empty() && part.planned < whole.planned);
                assert_eq!((whole.sent, part.sent), (whole.planned, part.planned));
                assert!(whole.seconds.is_sorted() && whole.seconds[0] > 0.0);
            }
        }
    }

    #[test]
    fn gradients_in_bf16_take_half_the_bytes_and_change_little() {
        let whole = Tuning { replicated: true, ..Tuning::default() };
        let half = Tuning { bf16: true, bucket_len: Some(500), ..whole };
        let [whole, half] = [whole, half].map(|tuning| train(&Case { tuning, ..case(Task::EveryStep) }));
        let ratio = half[0].sent as f64 / whole[0].sent as f64;
        assert!((0.5..0.6).contains(&ratio), "{ratio}");
        assert_ne!(half[0].digest, whole[0].digest);
        assert_eq!(half[0].digest, half[1].digest);
        assert!(half[0].losses.iter().zip(&whole[0].losses).all(|(a, b)| (a / b - 1.0).abs() < 1e-2));
    }

    #[test]
    fn another_peak_of_the_learning_rate_is_another_training() {
        let higher = Tuning { peak: Some(1e-2), ..Tuning::default() };
        let [low, high] =
            [Tuning::default(), higher].map(|tuning| train(&Case { tuning, ..case(Task::EveryStep) }));
        assert_eq!(low[0].losses[0], high[0].losses[0]);
        assert_ne!(low[0].digest, high[0].digest);
    }
}
