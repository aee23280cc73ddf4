//! Command line of `train`.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use clap::builder::ArgPredicate;
use meshstep_parallel3d::Mesh;
use serde::Serialize;

use crate::args::local::Asked;
use crate::args::meshes::compared;
use crate::args::within;

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
    /// Ranks, each a thread with its own batches; with --local, workers; with --slots also several numbers of ranks, such as
    /// 1,2,3,4,8
    #[arg(long, visible_alias = "workers", default_value = "4", value_delimiter = ',', value_parser = within::<1, 64>)]
    #[serde(serialize_with = "first")]
    pub(crate) ranks: Vec<usize>,
    /// Train over this many micro-batches a step in a fixed order, on each number of --ranks, and compare the results; beside them
    /// ordinary means of the same micro-batches
    #[arg(long, value_name = "COUNT", value_parser = within::<1, 1024>)]
    #[arg(conflicts_with_all = ["mesh", "compare", "local", "save_every", "resume"])]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) slots: Option<usize>,
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
    /// Elements after which a gradient bucket is closed and reduced [default: a sixteenth of the parameters, with muon all]
    #[arg(long, value_name = "ELEMS", value_parser = within::<1, { 1 << 40 }>)]
    pub(crate) bucket: Option<usize>,
    /// Cores to use: updates share this number of threads, and each rank's matrix products get an equal part of them,
    /// unless RAYON_NUM_THREADS is set [default: all]
    #[arg(long, value_parser = within::<1, 1024>)]
    pub(crate) threads: Option<usize>,
    /// A text file, or a folder with .md, .rs and .txt files [default: the Rust sources of this workspace's dependencies]
    #[arg(long, value_name = "FILE|DIR")]
    pub(crate) corpus: Option<PathBuf>,
    /// Save a checkpoint every so many steps, after the last step, and before the end that SIGTERM, SIGUSR1 or Ctrl-C asks for;
    /// keeps the newest two
    #[arg(long, value_name = "STEPS", value_parser = within::<1, 1_000_000>)]
    #[serde(skip)]
    pub(crate) save_every: Option<usize>,
    /// Continue from the newest checkpoint, at any stage and on any mesh
    #[arg(long)]
    #[serde(skip)]
    pub(crate) resume: bool,
    /// Take the folder of the checkpoints over from a job of another host that was killed; that job must have ended
    #[arg(long, requires = "save_every")]
    #[serde(skip)]
    pub(crate) take_over: bool,
    /// Save beside checkpoints of another run, or of an earlier version, as if they were this run's
    #[arg(long, requires = "save_every")]
    #[serde(skip)]
    pub(crate) adopt: bool,
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
    pub(crate) local: Box<Asked>,
}

/// Update rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Optimizer {
    /// AdamW, beta 0.9 and 0.99, weight decay 0.1 on matrices.
    Adamw,
    /// Muon (Moonshot's) on the matrices of hidden layers, weight decay 0.1; AdamW on embeddings, head, biases and norms.
    Muon,
    /// SGD with Nesterov momentum 0.9.
    Sgd,
}

/// Writes the first number.
fn first<S: serde::Serializer>(ranks: &[usize], serializer: S) -> Result<S::Ok, S::Error> {
    ranks.first().serialize(serializer)
}

impl Train {
    /// Returns the number of ranks, the first if there are several.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks.first().copied().unwrap_or(1)
    }

    /// Refuses several numbers of ranks without slots, and fewer slots than ranks.
    pub(crate) fn check_ranks(&self) -> Result<()> {
        match self.slots {
            Some(slots) => ensure!(
                self.ranks.iter().all(|&ranks| ranks <= slots),
                "--slots {slots} is below a number of --ranks; each rank computes at least one slot"
            ),
            None => {
                ensure!(self.ranks.len() == 1, "several numbers of --ranks are compared with --slots only")
            }
        }
        Ok(())
    }

    /// Returns the stages to run, in order.
    pub(crate) fn stages(&self) -> Vec<u8> {
        let last = if self.meshes().is_empty() { 2 } else { 3 };
        self.stage.map_or_else(|| (0..=last).collect(), |stage| vec![stage])
    }

    /// Returns the meshes to run, the reference first; empty if the network is whole on every rank.
    pub(crate) fn meshes(&self) -> Vec<Mesh> {
        let compared = if self.compare { compared() } else { Vec::new() };
        compared.into_iter().chain(self.mesh.iter().cloned()).collect()
    }

    /// Returns the number of steps that are taken when the run ends.
    pub(crate) fn last_step(&self) -> usize {
        self.until.unwrap_or(self.steps).min(self.steps)
    }

    /// Returns the maximum number of threads that compute at the same time.
    pub(crate) fn most_ranks(&self) -> usize {
        self.meshes()
            .iter()
            .map(Mesh::world_size)
            .max()
            .unwrap_or_else(|| self.ranks.iter().copied().max().unwrap_or(1))
    }
}
