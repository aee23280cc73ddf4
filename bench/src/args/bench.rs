//! Command line of `bench`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::args::Device;

/// Options of `bench`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Bench {
    /// Suites to run [default: all but network]
    #[arg(value_enum, value_name = "SUITE")]
    pub(crate) suites: Vec<Suite>,
    /// Small sizes and few rounds: under a minute for all suites
    #[arg(long)]
    pub(crate) quick: bool,
    /// Also measure other systems: PyTorch, which is installed from PyPI into --out (5 GB), and OpenMPI if it is installed; all
    /// parts, or those of --peers=PART,..
    #[arg(long, value_enum, value_name = "PART", num_args = 0.., require_equals = true, value_delimiter = ',')]
    pub(crate) peers: Option<Vec<PeerPart>>,
    /// Device to measure on; the only suite for a GPU is `kernels`
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) device: Device,
    /// A report.json of this machine; reports which times are slower now
    #[arg(long, value_name = "FILE")]
    pub(crate) baseline: Option<PathBuf>,
    /// Output folder for report.html, report.md and report.json [default: target/bench of this workspace]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

/// A suite, which becomes a section of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Suite {
    /// Bytes that a rank holds, by purpose: unsharded and with every stage, measured and planned
    Memory,
    /// Time of a whole step, unsharded and with every stage, on the same gradients
    Speed,
    /// Every update rule and recipe compared with a copy of the same bytes
    Kernels,
    /// Collectives compared with a copy of the same bytes
    Comm,
    /// Bytes that each stage holds and sends, compared with formulas, and the balance of ownership
    Stages,
    /// Cost against parameters and ranks, and predicted steps of clusters
    Scaling,
    /// Training by workers behind slow links: needs root, and is only run if it is named
    Network,
}

/// A part of the comparisons with other systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PeerPart {
    /// Updates of one large vector
    Updates,
    /// Small updates, and clipped steps of one rank
    OneRank,
    /// One iteration of L-BFGS
    Lbfgs,
    /// A step of Muon on one matrix
    Muon,
    /// Ranks of this library as threads beside processes of the others
    Ranks,
    /// Ranks as processes on both sides: collectives and steps of many bytes
    Processes,
    /// Ranks as processes on both sides: small messages and small steps
    SmallMessages,
}

impl Bench {
    /// Returns the suites to run, each once, in their order.
    pub(crate) fn suites(&self) -> Result<Vec<Suite>> {
        let there = |suite: Suite| self.device == Device::Cpu || suite == Suite::Kernels;
        if let Some(suite) = self.suites.iter().find(|suite| !there(**suite)) {
            bail!(
                "--device cuda: {} is measured on the CPU; the only suite for a GPU is kernels",
                suite.name()
            );
        }
        let all = Suite::value_variants().iter().copied();
        Ok(all
            .filter(|suite| self.suites.contains(suite) || self.suites.is_empty() && *suite != Suite::Network)
            .filter(|&suite| there(suite))
            .collect())
    }
}

impl Suite {
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    struct OnlyBench {
        #[command(flatten)]
        bench: Bench,
    }

    #[test]
    fn comparisons_are_none_all_or_the_named_parts() {
        let parsed =
            |args: &[&str]| OnlyBench::try_parse_from([&["bench"][..], args].concat()).unwrap().bench;
        assert_eq!(parsed(&["comm"]).peers, None);
        let all = parsed(&["--peers", "comm"]);
        assert_eq!((all.peers, all.suites), (Some(vec![]), vec![Suite::Comm]));
        let parts = parsed(&["--peers=lbfgs,one-rank", "--quick"]).peers;
        assert_eq!(parts, Some(vec![PeerPart::Lbfgs, PeerPart::OneRank]));
    }
}
