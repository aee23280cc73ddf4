//! Command line of `train --local`: the methods, and the flags that each method accepts.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Options of `train` that divide one optimizer among its ranks; a worker of `--local` has only one rank.
const NOT_WITH_WORKERS: [&str; 11] = [
    "stage",
    "mesh",
    "compare",
    "optimizer",
    "bucket",
    "save_every",
    "resume",
    "take_over",
    "adopt",
    "until",
    "checkpoints",
];

/// Options of `train` for local training: workers step alone and exchange parameters every few steps.
#[derive(Clone, Debug, Default, clap::Args, Serialize)]
#[command(next_help_heading = "Local training")]
pub(crate) struct Asked {
    /// Train workers (--ranks) that step alone, each on its own part of the text, and exchange parameters every few steps
    #[arg(long, value_enum, value_name = "METHOD", conflicts_with_all = NOT_WITH_WORKERS)]
    pub(crate) local: Option<Task>,
    /// Steps between two exchanges of the parameters (H of DiLoCo) [default: 16]
    #[arg(long, value_name = "STEPS", requires = "local", value_parser = steps)]
    pub(crate) kx: Option<u64>,
    /// Steps between two exchanges of first moments, or never; for mt-dao one value for each moment, separated by commas
    /// [default: 3 kx]
    #[arg(long, value_name = "STEPS", requires = "local", value_delimiter = ',')]
    pub(crate) ku: Vec<Period>,
    /// Steps between two exchanges of second moments, or never [default: 6 kx]
    #[arg(long, value_name = "STEPS", requires = "local")]
    pub(crate) kv: Option<Period>,
    /// des-loc: use each moment's half-life as its period
    #[arg(long, requires = "local", conflicts_with_all = ["ku", "kv"])]
    pub(crate) half_lives: bool,
    /// mt-dao, every-step-qhadamw: decay and weight of each first moment, separated by commas [default: 0.995:0.7]
    #[arg(long, value_name = "BETA:WEIGHT", requires = "local", value_delimiter = ',')]
    pub(crate) moments: Vec<Moment>,
    /// post-local-sgd: number of initial steps that exchange parameters in every step [default: a sixth of the steps]
    #[arg(long, value_name = "STEPS", requires = "local")]
    pub(crate) every_step: Option<u64>,
    /// diloco, streaming-diloco: learning rate of the outer optimizer [default: 0.5]
    #[arg(long, value_name = "LR", requires = "local")]
    pub(crate) outer_lr: Option<f64>,
    /// diloco, streaming-diloco: Nesterov momentum of the outer optimizer [default: 0.5 for diloco, 0.7 for
    /// streaming-diloco]
    #[arg(long, value_name = "BETA", requires = "local")]
    pub(crate) outer_momentum: Option<f64>,
    /// streaming-diloco: number of fragments, which are exchanged at different steps [default: 4]
    #[arg(long, requires = "local", value_parser = crate::args::within::<1, 4096>)]
    pub(crate) parts: Option<usize>,
    /// streaming-diloco: steps until a fragment's result arrives, below kx [default: a quarter of kx]
    #[arg(long, value_name = "STEPS", requires = "local")]
    pub(crate) delay: Option<u64>,
    /// streaming-diloco: share of a worker's own parameters in the merged ones, from 0 to below 1 [default: 0.5]
    #[arg(long, requires = "local")]
    pub(crate) alpha: Option<f64>,
    /// Remove and add workers during the training, at steps drawn from this seed
    #[arg(long, value_name = "SEED", requires = "local")]
    pub(crate) chaos: Option<u64>,
    /// Give each worker text of another kind: blocks of the text sorted by their share of letters
    #[arg(long, requires = "local")]
    pub(crate) unlike: bool,
    /// Train one worker in this process, which joins and leaves the run of the arbiter at this address (`cargo xtask arbiter`);
    /// several addresses, separated by commas, are the arbiter's and its standbys'. --ranks is the number of workers that the run
    /// begins with
    #[arg(
        long,
        value_name = "ADDR",
        requires = "local",
        requires = "worker",
        conflicts_with = "chaos",
        value_delimiter = ','
    )]
    pub(crate) arbiter: Vec<SocketAddr>,
    /// Id of this worker, unique in the run; it selects the worker's part of the text
    #[arg(long, value_name = "ID", requires = "arbiter")]
    pub(crate) worker: Option<u64>,
    /// Name of the run, the same as the arbiter's [default: train]
    #[arg(long, value_name = "NAME", requires = "local")]
    pub(crate) run: Option<String>,
    /// Longest wait for an answer of the arbiter in seconds; longer than workers take for the steps between two exchanges [default:
    /// 120]
    #[arg(long, value_name = "SECONDS", requires = "arbiter", value_parser = crate::args::within::<1, 86_400>)]
    pub(crate) answer: Option<usize>,
    /// Steps after the last exchange that the worker takes on its own while no arbiter can be reached; then it waits as long as for
    /// an answer, and ends with an error [default: 8 kx]
    #[arg(long, value_name = "STEPS", requires = "arbiter")]
    pub(crate) alone: Option<u64>,
    /// Longest wait in seconds for another worker within an exchange, and for the members of a new epoch to connect [default: 60]
    #[arg(long, value_name = "SECONDS", requires = "arbiter", value_parser = crate::args::within::<1, 86_400>)]
    pub(crate) deadline: Option<usize>,
    /// Address by which the other workers reach this one [default: 127.0.0.1]
    #[arg(long, value_name = "IP", requires = "arbiter")]
    pub(crate) contact: Option<IpAddr>,
}

/// Longest period.
const MAX_STEPS: u64 = 1_000_000;

/// Values of `--local`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Task {
    /// AdamW with gradients reduced in every step: the baseline of the methods with AdamW
    EveryStep,
    /// SGD with gradients reduced in every step: the baseline of local-sgd and post-local-sgd
    EveryStepSgd,
    /// QHAdamW with gradients reduced in every step: the baseline of mt-dao
    EveryStepQhadamw,
    /// SGD; parameters are averaged every kx steps
    LocalSgd,
    /// SGD; parameters are averaged in every one of the first steps, then every kx steps
    PostLocalSgd,
    /// AdamW; parameters and both moments are averaged every kx steps
    LocalAdam,
    /// AdamW; parameters, first and second moments are averaged every kx, ku and kv steps
    DesLoc,
    /// QHAdamW; each slow first moment has its own period
    MtDao,
    /// AdamW; every kx steps an outer Nesterov step with the mean difference
    Diloco,
    /// DiLoCo in fragments; results arrive some steps later
    StreamingDiloco,
    /// Every method and its baseline in one report, three seeds for each
    All,
    /// DES-LOC (32, 96, 192) compared with Local Adam (32) and with AdamW in every step, three seeds each
    Compare,
    /// Local Adam with twice as many workers in the second half: moments averaged, or kept by each worker, three seeds each
    Doubling,
}

/// Methods: the tasks that are one training. Baselines come first.
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

/// Period of a moment: a number of steps, or `None` for never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Period(pub(crate) Option<u64>);

/// A first moment: its decay, and its weight in the step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Moment {
    pub(crate) beta: f64,
    pub(crate) weight: f64,
}

impl Asked {
    /// Rejects flags that the task does not use.
    pub(crate) fn check_flags(&self, task: Task) -> Result<()> {
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
                bail!("{flag} does not apply to --local {task}, which takes none of these flags")
            }
            Some((flag, _)) => {
                bail!("{flag} does not apply to --local {task}, which takes {}", takes.join(", "))
            }
        }
    }

    /// Returns the name of the run of elastic workers.
    pub(crate) fn run(&self) -> &str {
        self.run.as_deref().unwrap_or("train")
    }

    /// Returns the address of this worker for the others.
    pub(crate) fn contact(&self) -> IpAddr {
        self.contact.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
    }

    /// Returns the steps that a worker may take without an arbiter.
    pub(crate) fn alone(&self) -> u64 {
        self.alone.unwrap_or(self.kx().saturating_mul(8))
    }

    /// Returns the longest wait for another worker within an exchange.
    pub(crate) fn deadline(&self) -> Duration {
        Duration::from_secs(self.deadline.unwrap_or(60) as u64)
    }

    /// Returns the steps between two exchanges of the parameters.
    pub(crate) fn kx(&self) -> u64 {
        self.kx.unwrap_or(16)
    }

    /// Returns the periods of `count` first moments.
    pub(crate) fn ku(&self, count: usize) -> Result<Vec<Option<u64>>> {
        if self.ku.is_empty() {
            return Ok(vec![Some(self.kx().saturating_mul(3)); count]);
        }
        ensure!(
            self.ku.len() == count,
            "--ku has {} periods for {count} first moments; give one for each, or none for the default 3 kx",
            self.ku.len()
        );
        Ok(self.ku.iter().map(|period| period.0).collect())
    }

    /// Returns the period of second moments.
    pub(crate) fn kv(&self) -> Option<u64> {
        self.kv.map_or(Some(self.kx().saturating_mul(6)), |period| period.0)
    }
}

impl Task {
    /// Returns the flags that the task uses.
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

    /// Returns the task with the same rule on gradients that are reduced in every step; `None` for baselines and for tasks
    /// of several trainings.
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
        // Every value is visible on the command line.
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
            _ => Err("give a decay and a weight, for example 0.995:0.7".to_owned()),
        }
    }
}

/// Parses a period other than never.
fn steps(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(steps) if (1..=MAX_STEPS).contains(&steps) => Ok(steps),
        _ => Err(format!("give a whole number of steps from 1 to {MAX_STEPS}")),
    }
}
