//! Command line: the subcommands and their options, with checks of their values.

use std::path::PathBuf;

use clap::builder::ArgPredicate;
use clap::{Parser, Subcommand, ValueEnum};
use meshstep_parallel3d::Mesh;
use serde::Serialize;

use crate::ckpt::Ckpt;
use crate::local;
use crate::measure::Bench;
use crate::mesh;

/// Benchmark and demonstration of Meshstep: trains a small GPT with the optimizer step on several ranks.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Subcommands of the program.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train the same network under ZeRO stages 0, 1 and 2, on meshes 0 to 3, compare the results bit for bit, and report
    /// the cost of each stage; or, with --local, train workers that exchange parameters only every few steps. With --local,
    /// exits with 0 if every bar holds, 1 if one is missed, 2 if nothing was trained or the training failed.
    /// RUST_LOG=meshstep=debug shows the spans of a step.
    Train(Train),
    /// Replay training steps that another program recorded, and report how far the results differ. Exits with 0 if all
    /// files agree, 1 if one is outside its tolerance, 2 if one cannot be replayed.
    Parity(Parity),
    /// Measure the cost and the savings of sharding in turns with a copy of the same bytes, and write a report. Exits with
    /// 0 if every bar holds, 1 if one is missed, 2 if something could not be measured.
    Bench(Bench),
    /// Inspect a checkpoint, verify it, or export its parameters.
    #[command(subcommand)]
    Ckpt(Ckpt),
}

/// Options of `parity`.
#[derive(Clone, Debug, clap::Args)]
#[command(allow_negative_numbers = true)]
pub(crate) struct Parity {
    /// Traces: safetensors files in the format of bench/traces/README.md
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// 0 replicates, 1 shards the optimizer's state, 2 also the gradients [default: 1]
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=2))]
    pub(crate) stage: Option<u8>,
    /// Ranks, each a thread; all of them use the gradients of a trace of one rank [default: as in the trace]
    #[arg(long, value_parser = within::<1, 64>)]
    pub(crate) ranks: Option<usize>,
    /// How parameters are divided among the ranks [default: whole for rules that need whole matrices, else flat]
    #[arg(long, value_enum)]
    pub(crate) partition: Option<Partition>,
    /// Elements after which a gradient bucket is closed and reduced
    #[arg(long, value_name = "ELEMS", value_parser = within::<1, { 1 << 40 }>)]
    pub(crate) bucket: Option<usize>,
    /// Device for the replay
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,
    /// Allowed difference relative to the expected value [default: as in the trace]
    #[arg(long, value_parser = at_least_zero)]
    pub(crate) rtol: Option<f64>,
    /// Allowed absolute difference in addition [default: as in the trace]
    #[arg(long, value_parser = at_least_zero)]
    pub(crate) atol: Option<f64>,
    /// Output file for a report in JSON
    #[arg(long, value_name = "OUT")]
    pub(crate) json: Option<PathBuf>,
    /// Output file for a table in Markdown
    #[arg(long, value_name = "OUT")]
    pub(crate) table: Option<PathBuf>,
}

/// Division of parameters among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Partition {
    /// Chunks of the flat vector.
    Flat,
    /// Whole parameters, largest first to the rank with the smallest load.
    Whole,
}

/// Device for a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// The CPU.
    Cpu,
    /// A CUDA GPU.
    Cuda,
}

/// Options of `train` that do not apply to a network spread over a mesh.
const NOT_ON_MESHES: [&str; 4] = ["ranks", "batch", "optimizer", "held_out"];

/// Options of `train`.
#[derive(Clone, Debug, clap::Args, Serialize)]
#[command(allow_negative_numbers = true)] // so that -1 is rejected as a number, not as an unknown option
pub(crate) struct Train {
    /// Only this stage: 0 replicates, 1 shards the optimizer's state, 2 also the gradients, 3 also the parameters (on
    /// meshes only) [default: all in turn]
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) stage: Option<u8>,
    /// Train a network that is spread over a mesh, such as tp=2,cp=2,dp=2: each rank is a thread with its part of the
    /// network. Repeat the option for several meshes, which must all agree with the first
    #[arg(long, value_name = "MESH", conflicts_with_all = NOT_ON_MESHES)]
    #[serde(skip)]
    pub(crate) mesh: Vec<Mesh>,
    /// Train on one rank and on five meshes of eight, and compare the results
    #[arg(long, conflicts_with_all = NOT_ON_MESHES)]
    #[serde(skip)]
    pub(crate) compare: bool,
    /// Ranks, each a thread with its own batches; with --local, workers
    #[arg(long, visible_alias = "workers", default_value_t = 4, value_parser = within::<1, 64>)]
    pub(crate) ranks: usize,
    /// Optimizer steps; 50 on meshes, 384 with --local, 160 with --local all, 768 with --local compare
    #[arg(long, default_value_t = 400, value_parser = within::<1, 1_000_000>)]
    #[arg(default_value_ifs = [("mesh", ArgPredicate::IsPresent, "50"), ("compare", ArgPredicate::Equals("true".into()), "50"),
        ("local", ArgPredicate::Equals("compare".into()), "768"), ("local", ArgPredicate::Equals("all".into()), "160"),
        ("local", ArgPredicate::IsPresent, "384")])]
    pub(crate) steps: usize,
    /// Sequences per step on each rank; 4 with --local
    #[arg(long, default_value_t = 2, value_parser = within::<1, 1024>)]
    #[arg(default_value_if("local", ArgPredicate::IsPresent, "4"))]
    pub(crate) batch: usize,
    /// Number of sequences for the held-out loss
    #[arg(long, value_name = "SEQUENCES", default_value_t = 256, value_parser = within::<1, 65_536>)]
    pub(crate) held_out: usize,
    /// Seed of initial values and batches
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Update rule
    #[arg(long, value_enum, default_value_t = Optimizer::Adamw)]
    pub(crate) optimizer: Optimizer,
    /// Elements after which a gradient bucket is closed and reduced [default: a sixteenth of the parameters]
    #[arg(long, value_name = "ELEMS", value_parser = within::<1, { 1 << 40 }>)]
    pub(crate) bucket: Option<usize>,
    /// Cores to use: updates share this number of threads, and each rank's matrix products get an equal part of them,
    /// unless RAYON_NUM_THREADS is set [default: all]
    #[arg(long, value_parser = within::<1, 1024>)]
    pub(crate) threads: Option<usize>,
    /// A text file, or a folder with .md, .rs and .txt files [default: the Rust sources of this workspace's dependencies]
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) corpus: Option<PathBuf>,
    /// Save a checkpoint every so many steps, and after the last step; keeps the newest two
    #[arg(long, value_name = "STEPS", value_parser = within::<1, 1_000_000>)]
    #[serde(skip)]
    pub(crate) save_every: Option<usize>,
    /// Continue from the newest checkpoint, at any stage and on any mesh
    #[arg(long)]
    #[serde(skip)]
    pub(crate) resume: bool,
    /// Stop after this step, to continue later
    #[arg(long, value_name = "STEP", requires = "save_every", value_parser = within::<1, 1_000_000>)]
    #[serde(skip)]
    pub(crate) until: Option<usize>,
    /// Folder of the checkpoints [default: checkpoints in --out]
    #[arg(long, value_name = "DIR")]
    #[serde(skip)]
    pub(crate) checkpoints: Option<PathBuf>,
    /// Output folder for train.json, and loss.svg without a mesh; for local.html and local.json with --local [default:
    /// target/train of this workspace]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) local: Box<local::Asked>,
}

/// Update rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Optimizer {
    /// AdamW, beta 0.9 and 0.99, weight decay 0.1 on matrices.
    Adamw,
    /// SGD with Nesterov momentum 0.9.
    Sgd,
}

impl Train {
    /// Returns the stages to run, in order.
    pub(crate) fn stages(&self) -> Vec<u8> {
        let last = if self.meshes().is_empty() { 2 } else { 3 };
        self.stage.map_or_else(|| (0..=last).collect(), |stage| vec![stage])
    }

    /// Returns the meshes to run, the reference first; empty if the network is whole on every rank.
    pub(crate) fn meshes(&self) -> Vec<Mesh> {
        let compared = if self.compare { mesh::compared() } else { Vec::new() };
        compared.into_iter().chain(self.mesh.iter().cloned()).collect()
    }

    /// Returns the number of steps that are taken when the run ends.
    pub(crate) fn last_step(&self) -> usize {
        self.until.unwrap_or(self.steps).min(self.steps)
    }

    /// Returns the maximum number of threads that compute at the same time.
    pub(crate) fn most_ranks(&self) -> usize {
        self.meshes().iter().map(Mesh::world_size).max().unwrap_or(self.ranks)
    }
}

/// Parses a finite number of at least 0.
fn at_least_zero(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if (0.0..f64::INFINITY).contains(&number) => Ok(number),
        _ => Err("give a number of at least 0".to_owned()),
    }
}

/// Parses a whole number from `MIN` to `MAX`.
pub(crate) fn within<const MIN: usize, const MAX: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if (MIN..=MAX).contains(&number) => Ok(number),
        _ => Err(format!("give a whole number from {MIN} to {MAX}")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn train(args: &str) -> Result<Train, String> {
        let words = ["meshstep-bench", "train"].into_iter().chain(args.split_whitespace());
        match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::Train(train) => Ok(train),
            _ => panic!("not train"),
        }
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn all_suites_run_unless_some_are_named() {
        let bench = |args: &str| match Cli::try_parse_from(
            ["meshstep-bench", "bench"].into_iter().chain(args.split_whitespace()),
        ) {
            Ok(Cli { command: Command::Bench(bench) }) => Ok(bench),
            Ok(_) => panic!("not bench"),
            Err(error) => Err(error.to_string()),
        };
        assert_eq!(bench("").unwrap().suites().unwrap().len(), 6);
        let names: Vec<String> =
            bench("scaling memory memory").unwrap().suites().unwrap().iter().map(|s| s.name()).collect();
        assert_eq!(names, ["memory", "scaling"]);
        let error = bench("memroy").unwrap_err();
        assert!(error.contains("memory") && error.contains("scaling"), "{error}");
    }

    #[test]
    fn all_stages_run_unless_one_is_named() {
        assert_eq!(train("").unwrap().stages(), [0, 1, 2]);
        assert_eq!(train("--stage 1").unwrap().stages(), [1]);
        assert_eq!(train("--mesh dp=2").unwrap().stages(), [0, 1, 2, 3]);
    }

    #[test]
    fn meshes_come_in_the_order_they_are_typed_behind_those_that_are_always_compared() {
        assert_eq!((train("").unwrap().meshes(), train("").unwrap().steps), (Vec::new(), 400));
        let two = train("--mesh dp=2 --mesh tp=2,cp=2,dp=2").unwrap();
        let names: Vec<String> = two.meshes().iter().map(Mesh::to_string).collect();
        assert_eq!(
            (names, two.steps, two.most_ranks()),
            (vec!["dp=2".into(), "dp=2,cp=2,tp=2".into()], 50, 8)
        );
        let compared = train("--compare --mesh tp=2 --steps 3").unwrap();
        assert_eq!((compared.meshes().len(), compared.meshes()[0].world_size(), compared.steps), (7, 1, 3));
        assert_eq!(train("--compare").unwrap().steps, 50);
    }

    #[test]
    fn bad_values_are_refused_with_what_would_work() {
        for (args, hint) in [
            ("--ranks 0", "from 1 to 64"),
            ("--ranks 65", "from 1 to 64"),
            ("--steps 0", "from 1 to 1000000"),
            ("--steps many", "from 1 to 1000000"),
            ("--batch -1", "from 1 to 1024"),
            ("--bucket 0", "from 1 to"),
            ("--threads 0", "from 1 to 1024"),
            ("--save-every 0", "from 1 to 1000000"),
            ("--until 3", "--save-every"),
            ("--stage 4", "0..=3"),
            ("--optimizer adam", "adamw, sgd"),
            ("--seed -1", "--seed"),
            ("--mesh tp=2,xp=2", "no axis is called \"xp\""),
            ("--mesh tp=0", "leave it out"),
            ("--mesh tp=2 --ranks 4", "cannot be used with"),
            ("--compare --batch 4", "cannot be used with"),
        ] {
            let error = train(args).unwrap_err();
            assert!(error.contains(hint), "{args}: {error}");
        }
    }
}
