//! Replays of traces made here and of those that are committed.

mod committed;
mod made;
mod plain;
mod problems;
mod ranks;
mod refusals;
mod rules;

use super::compare::Difference;
use super::reason::Reason;
use super::setting::Asked;
use super::trace::Trace;
use crate::cli::Partition;

/// Replays a file's `bytes`.
fn replay(bytes: &[u8], asked: Asked) -> Result<Difference, Reason> {
    let trace = Trace::parse(bytes)?;
    let got = super::replay::replay(&trace, asked)?;
    Difference::new(&trace, &got, trace.spec.tolerance)
}

/// Every stage and partition, as the command line has them.
fn settings() -> impl Iterator<Item = Asked> {
    let stages = [
        (Some(0), None),
        (Some(1), Some(Partition::Flat)),
        (Some(2), Some(Partition::Flat)),
        (None, Some(Partition::Whole)),
    ];
    stages.into_iter().map(|(stage, partition)| Asked { stage, partition, ..Asked::default() })
}
