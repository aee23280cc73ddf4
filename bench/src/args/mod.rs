//! Command lines of the subcommands, and the values that several of them take: parsers of numbers, and the device.

pub(crate) mod bench;
pub(crate) mod local;
pub(crate) mod meshes;
pub(crate) mod train;

use clap::ValueEnum;

/// Device for a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// The CPU.
    Cpu,
    /// A CUDA GPU.
    Cuda,
}

/// Parses a whole number from `MIN` to `MAX`.
pub(crate) fn within<const MIN: usize, const MAX: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if (MIN..=MAX).contains(&number) => Ok(number),
        _ => Err(format!("give a whole number from {MIN} to {MAX}")),
    }
}

/// This package's folder in the workspace of the build.
pub(crate) const FOLDER: &str = env!("CARGO_MANIFEST_DIR");
