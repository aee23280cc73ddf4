//! Command line of `parity`.

use std::path::PathBuf;

use clap::ValueEnum;

use crate::number::{at_least_zero, within};

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

/// Device for a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// The CPU.
    Cpu,
    /// A CUDA GPU.
    Cuda,
}

/// Division of parameters among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Partition {
    /// Chunks of the flat vector.
    Flat,
    /// Whole parameters, largest first to the rank with the smallest load.
    Whole,
}
