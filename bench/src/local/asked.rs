//! What can be asked of `train --local`: the methods, the flags of each, and what is refused before anything is computed.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use serde::Serialize;

/// Options of `train` that say how one optimizer is spread over its ranks; workers that meet seldom have one rank each.
const NOT_WITH_WORKERS: [&str; 9] =
    ["stage", "mesh", "compare", "optimizer", "bucket", "save_every", "resume", "until", "checkpoints"];

/// Options of `train` for workers that step alone and meet seldom.
#[derive(Clone, Debug, Default, clap::Args, Serialize)]
#[command(next_help_heading = "Workers that meet seldom")]
pub(crate) struct Asked {
    /// Train workers (--ranks) that step alone, each on its own part of the text, and meet seldom
    #[arg(long, value_enum, value_name = "METHOD", conflicts_with_all = NOT_WITH_WORKERS)]
    pub(crate) local: Option<Task>,
    /// Steps from one exchange of the parameters to the next (H of DiLoCo) [default: 16]
    #[arg(long, value_name = "STEPS", requires = "local", value_parser = steps)]
    pub(crate) kx: Option<u64>,
    /// The same of first moments, or never; for mt-dao one for each moment, with commas [default: 3 kx]
    #[arg(long, value_name = "STEPS", requires = "local", value_delimiter = ',')]
    pub(crate) ku: Vec<Period>,
    /// The same of second moments, or never [default: 6 kx]
    #[arg(long, value_name = "STEPS", requires = "local")]
    pub(crate) kv: Option<Period>,
    /// des-loc: each moment's half-life as its period
    #[arg(long, requires = "local", conflicts_with_all = ["ku", "kv"])]
    pub(crate) half_lives: bool,
    /// mt-dao, every-step-qhadamw: decay and weight of each first moment, with commas [default: 0.995:0.7]
    #[arg(long, value_name = "BETA:WEIGHT", requires = "local", value_delimiter = ',')]
    pub(crate) moments: Vec<Moment>,
    /// post-local-sgd: so many first steps exchange parameters each [default: a sixth of the steps]
    #[arg(long, value_name = "STEPS", requires = "local")]
    pub(crate) every_step: Option<u64>,
    /// diloco, streaming-diloco: learning rate of the outer optimizer [default: 0.5]
    #[arg(long, value_name = "LR", requires = "local")]
    pub(crate) outer_lr: Option<f64>,
    /// diloco, streaming-diloco: its Nesterov momentum [default: 0.5, and 0.7]
    #[arg(long, value_name = "BETA", requires = "local")]
    pub(crate) outer_momentum: Option<f64>,
    /// streaming-diloco: fragments, exchanged at different steps [default: 4]
    #[arg(long, requires = "local", value_parser = crate::cli::within::<1, 4096>)]
    pub(crate) parts: Option<usize>,
    /// streaming-diloco: steps until a fragment's result arrives, below kx [default: a quarter of kx]
    #[arg(long, value_name = "STEPS", requires = "local")]
    pub(crate) delay: Option<u64>,
    /// streaming-diloco: the share of a worker's own in what it goes on with, from 0 to below 1 [default: 0.5]
    #[arg(long, requires = "local")]
    pub(crate) alpha: Option<f64>,
    /// Lose workers and add some while they train, when and whom by this seed
    #[arg(long, value_name = "SEED", requires = "local")]
    pub(crate) chaos: Option<u64>,
    /// Give each worker text of another kind: blocks of the text by their share of letters
    #[arg(long, requires = "local")]
    pub(crate) unlike: bool,
}

/// The longest period.
const MAX_STEPS: u64 = 1_000_000;

/// What `--local` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Task {
    /// AdamW on gradients that are reduced in every step: the baseline of the methods on AdamW
    EveryStep,
    /// The same with SGD: the baseline of local-sgd and post-local-sgd
    EveryStepSgd,
    /// The same with QHAdamW: the baseline of mt-dao
    EveryStepQhadamw,
    /// SGD; parameters are averaged every kx steps
    LocalSgd,
    /// The same, after first steps that average each
    PostLocalSgd,
    /// AdamW; parameters and both moments are averaged every kx steps
    LocalAdam,
    /// AdamW; parameters, first and second moments every kx, ku and kv steps
    DesLoc,
    /// QHAdamW, whose slow first moments have a period each
    MtDao,
    /// AdamW; every kx steps an outer Nesterov step on the mean difference
    Diloco,
    /// DiLoCo in fragments whose results arrive later
    StreamingDiloco,
    /// All of these in one report, each beside its baseline, three seeds each
    All,
    /// DES-LOC (32, 96, 192) held to Local Adam (32) and to AdamW in every step, three seeds each
    Compare,
    /// Local Adam whose workers double half way: moments averaged, or each worker's own, three seeds each
    Doubling,
}

/// A method: a [`Task`] that is one training. Baselines come first.
pub(crate) const METHODS: [Task; 10] = [
    Task::EveryStep,
    Task::EveryStepSgd,
    Task::EveryStepQhadamw,
    Task::LocalSgd,
    Task::PostLocalSgd,
    Task::LocalAdam,
    Task::DesLoc,
    Task::MtDao,
    Task::Diloco,
    Task::StreamingDiloco,
];

/// A period of a moment: steps, or never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Period(pub(crate) Option<u64>);

/// A first moment: how much of it an update keeps, and how much it weighs in a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Moment {
    pub(crate) beta: f64,
    pub(crate) weight: f64,
}

impl Asked {
    /// Refuses flags that the task would not look at.
    pub(super) fn check_flags(&self, task: Task) -> Result<()> {
        let given = [
            ("--kx", self.kx.is_some()),
            ("--ku", !self.ku.is_empty()),
            ("--kv", self.kv.is_some()),
            ("--half-lives", self.half_lives),
            ("--moments", !self.moments.is_empty()),
            ("--every-step", self.every_step.is_some()),
            ("--outer-lr", self.outer_lr.is_some()),
            ("--outer-momentum", self.outer_momentum.is_some()),
            ("--parts", self.parts.is_some()),
            ("--delay", self.delay.is_some()),
            ("--alpha", self.alpha.is_some()),
            ("--chaos", self.chaos.is_some()),
            ("--unlike", self.unlike),
        ];
        let takes = task.takes();
        match given.into_iter().find(|(flag, given)| *given && !takes.contains(flag)) {
            None => Ok(()),
            Some((flag, _)) if takes.is_empty() => {
                bail!("{flag} is not for --local {task}, which takes none of these")
            }
            Some((flag, _)) => bail!("{flag} is not for --local {task}, which takes {}", takes.join(", ")),
        }
    }

    /// Steps from one exchange of the parameters to the next.
    pub(super) fn kx(&self) -> u64 {
        self.kx.unwrap_or(16)
    }

    /// The periods of `count` first moments.
    pub(super) fn ku(&self, count: usize) -> Result<Vec<Option<u64>>> {
        if self.ku.is_empty() {
            return Ok(vec![Some(self.kx().saturating_mul(3)); count]);
        }
        ensure!(
            self.ku.len() == count,
            "--ku has {} periods for {count} first moments; give one for each, or none for 3 kx",
            self.ku.len()
        );
        Ok(self.ku.iter().map(|period| period.0).collect())
    }

    /// The period of second moments.
    pub(super) fn kv(&self) -> Option<u64> {
        self.kv.map_or(Some(self.kx().saturating_mul(6)), |period| period.0)
    }
}

impl Task {
    /// The flags that it looks at.
    fn takes(self) -> &'static [&'static str] {
        match self {
            Task::Compare => &[],
            Task::EveryStep | Task::EveryStepSgd => &["--unlike"],
            Task::EveryStepQhadamw => &["--moments", "--unlike"],
            Task::All | Task::Doubling => &["--kx", "--unlike"],
            Task::LocalSgd | Task::LocalAdam => &["--kx", "--chaos", "--unlike"],
            Task::PostLocalSgd => &["--kx", "--every-step", "--chaos", "--unlike"],
            Task::DesLoc => &["--kx", "--ku", "--kv", "--half-lives", "--chaos", "--unlike"],
            Task::MtDao => &["--kx", "--ku", "--kv", "--moments", "--chaos", "--unlike"],
            Task::Diloco => &["--kx", "--outer-lr", "--outer-momentum", "--chaos", "--unlike"],
            Task::StreamingDiloco => &[
                "--kx",
                "--outer-lr",
                "--outer-momentum",
                "--parts",
                "--delay",
                "--alpha",
                "--chaos",
                "--unlike",
            ],
        }
    }

    /// The same rule on gradients that are reduced in every step; none of what is that itself, or more than one training.
    pub(crate) fn baseline(self) -> Option<Task> {
        match self {
            Task::EveryStep | Task::EveryStepSgd | Task::EveryStepQhadamw => None,
            Task::All | Task::Compare | Task::Doubling => None,
            Task::LocalSgd | Task::PostLocalSgd => Some(Task::EveryStepSgd),
            Task::LocalAdam | Task::DesLoc | Task::Diloco | Task::StreamingDiloco => Some(Task::EveryStep),
            Task::MtDao => Some(Task::EveryStepQhadamw),
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // No value is hidden from the command line.
        self.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
    }
}

impl FromStr for Period {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("never", _) => Ok(Period(None)),
            (_, Ok(period)) if (1..=MAX_STEPS).contains(&period) => Ok(Period(Some(period))),
            _ => Err(format!("give a whole number of steps from 1 to {MAX_STEPS}, or never")),
        }
    }
}

impl FromStr for Moment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once(':').map(|(beta, weight)| (beta.parse(), weight.parse()));
        match parts {
            Some((Ok(beta), Ok(weight))) => Ok(Moment { beta, weight }),
            _ => Err("give a decay and a weight, such as 0.995:0.7".to_owned()),
        }
    }
}

/// A period that is not never.
fn steps(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(steps) if (1..=MAX_STEPS).contains(&steps) => Ok(steps),
        _ => Err(format!("give a whole number of steps from 1 to {MAX_STEPS}")),
    }
}
