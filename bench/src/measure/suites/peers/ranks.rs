//! Comparisons with several ranks: steps, and collectives.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use meshstep_bench_cases::collectives::{Only, moved, operations, share_of_copy};
use meshstep_bench_cases::ranks::{Race, in_turns};
use meshstep_bench_cases::shapes::even;
use meshstep_bench_cases::step::{StepAndCopy, moved_a_param};
use meshstep_comm::Communicator;
use meshstep_shard::Stage;
use meshstep_tensor::DType;
use serde_json::json;

use super::rows::{Aim, PeerTable, Sides};
use crate::measure::effort::Effort;
use crate::measure::peers::{Mpi, TorchPair};
use crate::measure::record::Section;

pub(super) const RANKS: usize = 4;

/// Share of the reference copy's speed that a step and a collective are to reach, as in the suites `speed` and `comm`.
const STEP: f64 = 1.0 / 1.5;
const COLLECTIVE: f64 = 1.0 / 1.3;

/// Compares a whole step of data-parallel ranks with 16 tensors of 1 Mi elements.
pub(super) fn steps(section: &mut Section, effort: Effort, torch: &mut TorchPair) -> Result<()> {
    let (count, len, rounds) = (16, effort.pick(1 << 14, 1 << 20), effort.pick(3, 11));
    let layout = even(count, len)?;
    let moved = moved_a_param(RANKS).times(count * len);
    let title = format!("a step of {RANKS} ranks, {} parameters", count * len);
    let mut table = PeerTable::new(title, Sides::ThreadsAgainstProcesses);
    for (name, theirs, aim) in [
        ("ZeroRedundancyOptimizer(fused AdamW) over gloo", "zero", Aim::OfReference(STEP)),
        ("all_reduce, clip, fused AdamW over gloo", "ddp", Aim::OfReference(STEP)),
        ("shared memory by hand", "by hand", Aim::OfReference(STEP)),
        (
            "shared memory by hand, one copy of the parameters for all ranks",
            "by hand, one copy",
            Aim::Ratio(1.25),
        ),
    ] {
        torch.case(json!({ "case": theirs, "count": count, "length": len, "ranks": RANKS }))?;
        let own = |comm: Arc<dyn Communicator>| StepAndCopy::new(&comm, Stage::Zero1, &layout, moved.total());
        let race = in_turns((RANKS, rounds), moved.total() / 2, own, || torch.run())?;
        table.torch_row(section, &format!("{name}; ours stage 1"), (race, moved), (aim, torch));
    }
    table.end(section);
    Ok(())
}

pub(super) fn gloo(section: &mut Section, effort: Effort, torch: &mut TorchPair) -> Result<()> {
    let title = format!("gloo's collectives, {RANKS} ranks");
    let mut table = PeerTable::new(title, Sides::ThreadsAgainstProcesses);
    let bytes = largest(effort);
    for (i, (name, ..)) in operations(RANKS).into_iter().enumerate() {
        torch
            .case(json!({ "case": "collective", "operation": name, "bytes": bytes, "ranks": RANKS }))
            .with_context(|| format!("gloo's {name}"))?;
        let race = collective(i, effort, || torch.run())?;
        let measured = (race, moved(RANKS, i, bytes));
        table.torch_row(section, &format!("gloo {name}"), measured, (Aim::OfReference(COLLECTIVE), torch));
    }
    table.end(section);
    Ok(())
}

pub(super) fn openmpi(section: &mut Section, effort: Effort, mpi: &mut Mpi) -> Result<()> {
    let title = format!("OpenMPI's collectives, {RANKS} ranks");
    let mut table = PeerTable::new(title, Sides::ThreadsAgainstProcesses);
    let bytes = largest(effort);
    for (i, (name, ..)) in operations(RANKS).into_iter().enumerate() {
        mpi.case(name, bytes, 1)?;
        let race = collective(i, effort, || mpi.run())?;
        let measured = (&race, moved(RANKS, i, bytes));
        table.row(section, &format!("OpenMPI {name}"), measured, Aim::OfReference(COLLECTIVE));
    }
    table.end(section);
    Ok(())
}

/// Returns the bytes of a rank's vector.
pub(super) fn largest(effort: Effort) -> usize {
    effort.pick(1 << 20, 64 << 20)
}

/// Races operation `i`.
fn collective(i: usize, effort: Effort, run: impl FnMut() -> Result<f64> + Send) -> Result<Race> {
    let len = largest(effort) / DType::F32.size();
    let own = |comm: Arc<dyn Communicator>| Only::new(comm, len, i);
    let mut race = in_turns((RANKS, effort.pick(3, 11)), RANKS * largest(effort), own, run)?;
    race.copy = race.copy.times(share_of_copy(RANKS, i));
    Ok(race)
}
