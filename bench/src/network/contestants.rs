//! The methods, each as a training on the same number of tokens.

use crate::args::local::Task;
use crate::gpt::{Config, Param};
use crate::local::timed::Case;
use crate::local::tuning::Tuning;
use crate::measure::effort::Effort;

use super::measured::Rate;

/// Number of times that a held-out loss is measured, about.
const MEASURED: u64 = 12;
/// Buckets of gradients, if they travel while the backward pass runs.
const BUCKETS: usize = 8;
/// Rate below which a training is not run until its target.
const SLOW: Rate = Rate(100);
/// Least number of steps at a slow rate.
const LEAST: u64 = 4;
/// Learning rate of twice the batch; with 1.4e-3, 2e-3 and 3e-3 its last held-out loss was 2.741, 2.702 and 2.667. The other methods
/// keep 2e-3: with 4e-3 AdamW in every step ended at 2.677 instead of 2.564, and with 1e-3, 1.4e-3, 2e-3 and 3e-3 DES-LOC at 2.782,
/// 2.735, 2.716 and 2.753. Four times the batch ended at 2.929 with 2e-3, and higher with 4e-3: the training has too few steps.
const PEAK_OF_LARGER: f64 = 3e-3;

/// Sizes of the trainings.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub(super) workers: usize,
    pub(super) network: Config,
    pub(super) steps: usize,
    /// Sequences per worker and step.
    pub(super) batch: usize,
    pub(super) held_out: usize,
    /// Steps between two exchanges.
    pub(super) kx: u64,
    /// The fastest first.
    pub(super) rates: Vec<Rate>,
}

/// One method.
#[derive(Clone, Debug)]
pub(super) struct Contestant {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) case: Case,
    /// Steps after which the exchanges repeat.
    pub(super) period: u64,
}

/// Role of a method in the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// AdamW in every step, as it is by default.
    Plain,
    /// AdamW in every step, with fewer bytes or steps.
    Tuned,
    LocalAdam,
    DesLoc,
    /// Another method with rare exchanges.
    Rare,
}

impl Kind {
    /// Returns true if gradients are reduced in every step.
    pub(super) fn is_every_step(self) -> bool {
        matches!(self, Kind::Plain | Kind::Tuned)
    }
}

impl Sizes {
    pub(super) fn of(effort: Effort, workers: usize) -> Self {
        let network = effort.pick(
            Config { layers: 1, heads: 2, width: 64, context: 32 },
            Config { layers: 4, heads: 4, width: 112, context: 32 },
        );
        let rates: &[u64] = match (effort.quick, workers) {
            (true, _) => &[100, 10],
            (false, 4) => &[10_000, 1000, 100, 10],
            // A minute less.
            (false, _) => &[10_000, 1000, 100],
        };
        Sizes {
            workers,
            network,
            steps: effort.pick(24, 192),
            batch: effort.pick(1, 4),
            held_out: effort.pick(16, 256),
            kx: effort.pick(4, 32),
            rates: rates.iter().map(|rate| Rate(*rate)).collect(),
        }
    }

    /// Returns the number of parameters.
    pub(super) fn params(&self) -> usize {
        self.network.params().iter().map(Param::len).sum()
    }

    /// Returns a training by `method`, `larger` times the batch, on the same tokens.
    fn case(&self, method: Task, larger: usize, tuning: Tuning) -> Case {
        let Sizes { network, steps, batch, held_out, kx, .. } = *self;
        let steps = steps / larger;
        Case {
            method,
            kx: (method != Task::EveryStep).then_some(kx),
            tuning,
            network,
            steps,
            last: steps as u64,
            batch: batch * larger,
            held_out,
            measured: MEASURED,
            seed: 1,
        }
    }
}

/// Returns all methods.
pub(super) fn contestants(sizes: &Sizes) -> Vec<Contestant> {
    let kx = sizes.kx;
    let bucket_len = Some(sizes.params().div_ceil(BUCKETS));
    let tuned = Tuning { replicated: true, bf16: true, bucket_len, peak: None };
    let (plain, larger) = (Tuning::default(), Tuning { peak: Some(PEAK_OF_LARGER), ..tuned });
    let every = |name: &str, kind, larger, tuning| Contestant {
        name: name.to_owned(),
        kind,
        case: sizes.case(Task::EveryStep, larger, tuning),
        period: 1,
    };
    let rare = |name: &str, kind, method, period| Contestant {
        name: format!("{name}, kx {kx}"),
        kind,
        case: sizes.case(method, 1, plain),
        period,
    };
    vec![
        every("AdamW every step, f32", Kind::Plain, 1, plain),
        every("AdamW every step, bf16, overlap", Kind::Tuned, 1, tuned),
        every("AdamW every step, bf16, overlap, 2x batch", Kind::Tuned, 2, larger),
        rare("Local Adam", Kind::LocalAdam, Task::LocalAdam, kx),
        rare("DES-LOC", Kind::DesLoc, Task::DesLoc, 6 * kx),
        rare("DiLoCo", Kind::Rare, Task::Diloco, kx),
        // The first results arrive in the second period, so that no period is like the first.
        rare("Streaming DiLoCo", Kind::Rare, Task::StreamingDiloco, sizes.steps as u64),
    ]
}

impl Contestant {
    /// Returns the training up to a step, without held-out losses.
    pub(super) fn until(&self, last: u64) -> Case {
        Case { last, measured: 0, ..self.case.clone() }
    }

    /// Returns the part of the training that is run at a rate: until `step`, or at a slow rate for whole periods before it.
    pub(super) fn towards(&self, step: f64, rate: Rate) -> Case {
        let (step, steps) = (step.ceil() as u64, self.case.steps as u64);
        let few = LEAST.next_multiple_of(self.period);
        let last = if rate.0 < SLOW.0 && few < step { few } else { step };
        self.until(last.clamp(1, steps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_methods_have_the_same_tokens_and_slow_rates_whole_periods() {
        for effort in [Effort { quick: true }, Effort { quick: false }] {
            let sizes = Sizes::of(effort, 4);
            for contestant in contestants(&sizes) {
                let Case { steps, batch, .. } = contestant.case;
                assert_eq!(steps * batch, sizes.steps * sizes.batch, "{}", contestant.name);
                assert!(steps.is_multiple_of(contestant.period as usize), "{}", contestant.name);
                let slow = contestant.towards(steps as f64, Rate(1)).last;
                assert!(slow.is_multiple_of(contestant.period) && slow >= LEAST, "{}", contestant.name);
                assert_eq!(contestant.towards(3.2, SLOW).last, 4);
            }
        }
    }
}
