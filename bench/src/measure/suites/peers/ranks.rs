//! Comparisons with several ranks: steps, and collectives.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use meshstep_bench_cases::collectives::{Only, operations, share_of_copy};
use meshstep_bench_cases::peers::Torch;
use meshstep_bench_cases::ranks::{Race, in_turns};
use meshstep_bench_cases::shapes::even;
use meshstep_bench_cases::step::{StepAndCopy, bytes_a_param};
use meshstep_comm::Communicator;
use meshstep_shard::Stage;
use meshstep_tensor::DType;
use serde_json::json;

use super::rows::{table, tell};
use crate::measure::effort::Effort;
use crate::measure::peers::Mpi;
use crate::measure::record::Section;

pub(super) const RANKS: usize = 4;

/// Compares a whole step of data-parallel ranks with 16 tensors of 1 Mi elements.
pub(super) fn steps(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let (count, len, rounds) = (16, effort.pick(1 << 14, 1 << 20), effort.pick(3, 11));
    let layout = even(count, len)?;
    let mut table = table(format!("a step of {RANKS} ranks, {} parameters", count * len));
    for (name, theirs, wanted) in [
        ("ZeroRedundancyOptimizer(fused AdamW) over gloo", "zero", 8.0),
        ("all_reduce, clip, fused AdamW over gloo", "ddp", 6.0),
        ("shared memory by hand", "by hand", 2.5),
        ("shared memory by hand, one copy of the parameters for all ranks", "by hand, one copy", 1.25),
    ] {
        torch.case(json!({ "case": theirs, "count": count, "length": len, "ranks": RANKS }))?;
        let own = |comm: Arc<dyn Communicator>| {
            StepAndCopy::new(&comm, Stage::Zero1, &layout, bytes_a_param(RANKS) * count * len)
        };
        let race = in_turns((RANKS, rounds), own, || torch.run())?;
        tell(section, &mut table, &format!("{name}; ours stage 1"), &race, wanted);
    }
    section.tables.push(table);
    Ok(())
}

pub(super) fn gloo(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let wanted = [8.0, 8.0, 5.0];
    let mut table = table(format!("gloo's collectives, {RANKS} ranks"));
    for (i, ((name, ..), wanted)) in operations(RANKS).into_iter().zip(wanted).enumerate() {
        let bytes = largest(effort);
        torch
            .case(json!({ "case": "collective", "operation": name, "bytes": bytes, "ranks": RANKS }))
            .with_context(|| format!("gloo's {name}"))?;
        let race = collective(i, effort, || torch.run())?;
        tell(section, &mut table, &format!("gloo {name}"), &race, wanted);
    }
    section.tables.push(table);
    Ok(())
}

pub(super) fn openmpi(section: &mut Section, effort: Effort, mpi: &mut Mpi) -> Result<()> {
    let wanted = [4.0, 4.0, 0.95];
    let mut table = table(format!("OpenMPI's collectives, {RANKS} ranks"));
    for (i, ((name, ..), wanted)) in operations(RANKS).into_iter().zip(wanted).enumerate() {
        mpi.case(name, largest(effort))?;
        let race = collective(i, effort, || mpi.run())?;
        tell(section, &mut table, &format!("OpenMPI {name}"), &race, wanted);
    }
    section.tables.push(table);
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
    let mut race = in_turns((RANKS, effort.pick(3, 11)), own, run)?;
    race.floor = race.floor.times(share_of_copy(RANKS, i));
    Ok(race)
}
