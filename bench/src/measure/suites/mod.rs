//! Suites: each measures one topic and returns a section of the report.

mod comm;
#[cfg(feature = "cuda")]
pub(crate) mod gpu;
mod kernels;
mod many;
mod memory;
#[cfg(not(feature = "cuda"))]
pub(crate) mod no_gpu;
pub(crate) mod peers;
mod references;
mod scaling;
mod spans;
mod speed;
mod stages;

#[cfg(not(feature = "cuda"))]
pub(crate) use no_gpu as gpu;

use anyhow::Result;

use super::record::Section;
use crate::args::bench::Suite;
use crate::measure::effort::Effort;

/// Runs a suite; `network` is the one that trains, above this module.
pub(crate) fn run(suite: Suite, effort: Effort, network: fn(Effort) -> Result<Section>) -> Result<Section> {
    match suite {
        Suite::Memory => memory::run(effort),
        Suite::Speed => speed::run(effort),
        Suite::Kernels => kernels::run(effort),
        Suite::Comm => comm::run(effort),
        Suite::Stages => stages::run(effort),
        Suite::Scaling => scaling::run(effort),
        Suite::Network => network(effort),
    }
}
