//! Command lines of the subcommands, and the values that several of them take: parsers of numbers, and the device.

pub(crate) mod arbiter;
pub(crate) mod bench;
pub(crate) mod local;
pub(crate) mod meshes;
pub(crate) mod parity;
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

/// Parses a finite number of at least 0.
pub(crate) fn at_least_zero(text: &str) -> Result<f64, String> {
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

/// This package's folder in the workspace of the build.
pub(crate) const FOLDER: &str = env!("CARGO_MANIFEST_DIR");
