//! Comparisons where people start: one rank, and updates that fit into the cache.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use meshstep_bench_cases::peers::Torch;
use meshstep_bench_cases::race::{Contestant, timed};
use meshstep_bench_cases::ranks::{Race, in_turns};
use meshstep_bench_cases::shapes;
use meshstep_bench_cases::step::{StepAndCopy, bytes_a_param};
use meshstep_bench_cases::update::{Case, case};
use meshstep_comm::Communicator;
use meshstep_optim::{Isa, Norm, NormAccumulator};
use meshstep_parallel3d::models::Gpt2;
use meshstep_shard::Stage;
use meshstep_tensor::{DType, Layout, Threads};
use serde_json::json;

use super::rows::{table, tell};
use crate::measure::effort::Effort;
use crate::measure::record::Section;

/// Elements that the updates of one sample pass over together.
const WORK: usize = 4 << 20;

/// Compares updates of vectors that fit into the cache, several in a row for each sample.
pub(super) fn small_updates(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let (rounds, threads) = (effort.pick(3, 21), Threads::shared().count());
    let mut table = table("small updates");
    for (len, wanted) in [(10_000, 1.1), (100_000, 1.1), (1_000_000, 1.1), (4_000_000, 1.1)] {
        let times = (WORK / len).max(1);
        torch.case(json!({ "case": "adamw fused", "length": len, "threads": threads, "times": times }))?;
        let several = |work: fn(&mut Case)| timed(move |case: &mut Case| (0..times).for_each(|_| work(case)));
        let theirs: Contestant<'_, Case> = Box::new(|_| torch.run());
        let turns = [several(Case::update), theirs, several(Case::copy)];
        let Race { ours, theirs, floor } = Race::run(&mut case("adamw", len)?, rounds, turns)?;
        let each = 1.0 / times as f64;
        let race = Race { ours: ours.times(each), theirs, floor: floor.times(each) };
        tell(section, &mut table, &format!("torch adamw fused, one tensor of {len}"), &race, wanted);
    }
    section.tables.push(table);
    Ok(())
}

/// Compares clipped steps of one rank with PyTorch's in one process, and with an update and a norm of one vector, which is the least
/// work of a step.
pub(super) fn steps(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let (rounds, threads) = (effort.pick(3, 11), Threads::shared().count());
    let (count, len) = (16, effort.pick(1 << 14, 1 << 20));
    let mut table = table("a clipped step of one rank");
    let own = |layout: Layout| {
        move |comm: Arc<dyn Communicator>| {
            let params: usize =
                layout.params().iter().map(|param| param.shape().iter().product::<usize>()).sum();
            StepAndCopy::new(&comm, Stage::Replicated, &layout, bytes_a_param(1) * params)
        }
    };
    let asked =
        json!({ "case": "adamw fused", "count": count, "length": len, "clip": true, "threads": threads });
    torch.case(asked)?;
    let race = in_turns((1, rounds), own(shapes::even(count, len)?), || torch.run())?;
    tell(section, &mut table, &format!("torch adamw fused, {count} tensors of {len}"), &race, 1.25);
    let race = in_turns((1, rounds), own(shapes::even(count, len)?), least(count * len)?)?;
    tell(
        section,
        &mut table,
        &format!("update and norm alone, {} parameters", count * len),
        &race,
        1.0 / 1.15,
    );
    if !effort.quick {
        torch.case(json!({ "case": "adamw fused", "model": "gpt2", "clip": true, "threads": threads }))?;
        let gpt2 = shapes::layout(&Gpt2::SMALL.model(DType::F32).build()?)?;
        let race = in_turns((1, rounds), own(gpt2), || torch.run())?;
        tell(section, &mut table, "torch adamw fused, GPT-2's 148 tensors", &race, 1.25);
    }
    section.tables.push(table);
    Ok(())
}

/// Returns an update of one vector after the norm of another.
fn least(len: usize) -> Result<impl FnMut() -> Result<f64> + Send> {
    let (mut case, grads) = (case("adamw", len)?, vec![1e-3f32; len]);
    Ok(move || {
        let start = Instant::now();
        let mut norm = NormAccumulator::new(Norm::L2);
        norm.add_on(Isa::detect(), &Threads::shared(), (&grads[..]).into())?;
        std::hint::black_box(norm.finish());
        case.update();
        Ok(start.elapsed().as_secs_f64())
    })
}
