//! What can be asked of `bench`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::cli::Device;

/// Options of `bench`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Bench {
    /// What is measured [default: everything]
    #[arg(value_enum, value_name = "SUITE")]
    pub(crate) suites: Vec<Suite>,
    /// Small sizes and few rounds: under a minute for everything
    #[arg(long)]
    pub(crate) quick: bool,
    /// Other systems too: PyTorch, which is installed into --out from PyPI (5 GB), and OpenMPI where it is installed
    #[arg(long)]
    pub(crate) peers: bool,
    /// Where it runs: on a GPU, `kernels`
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,
    /// A report.json of this machine: tell what has become slower since
    #[arg(long, value_name = "FILE")]
    pub(crate) baseline: Option<PathBuf>,
    /// Where report.html, report.md and report.json go [default: target/bench of this workspace]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

/// A part of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Suite {
    /// Bytes a rank holds, by purpose: unsharded and under every stage, measured and planned
    Memory,
    /// Time of a whole step, unsharded and under every stage, on the same gradients
    Speed,
    /// Every update rule and recipe beside a copy of the same bytes
    Kernels,
    /// Collectives beside a copy of the same bytes
    Comm,
    /// What each stage holds and sends, by formula, and who owns how much
    Stages,
    /// Cost against parameters and ranks, and predicted steps of clusters
    Scaling,
}

impl Bench {
    /// The suites to run, each once, in their order.
    pub(crate) fn suites(&self) -> Result<Vec<Suite>> {
        let there = |suite: Suite| self.device == Device::Cpu || suite == Suite::Kernels;
        if let Some(suite) = self.suites.iter().find(|suite| !there(**suite)) {
            bail!("--device cuda: {} is measured on the CPU; on a GPU, kernels", suite.name());
        }
        let all = Suite::value_variants().iter().copied();
        Ok(all
            .filter(|suite| self.suites.is_empty() || self.suites.contains(suite))
            .filter(|&suite| there(suite))
            .collect())
    }
}

impl Suite {
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}
