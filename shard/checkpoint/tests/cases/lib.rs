//! Disks in memory, and the bodies of the fuzz targets of checkpoints.
#![allow(clippy::unwrap_used, reason = "a finding is a panic")]

pub mod fuzzed;
pub mod greedy;
mod memory;
mod sim;

pub use memory::Memory;
pub use sim::Sim;
