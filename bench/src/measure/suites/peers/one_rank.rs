//! Comparisons where people start: one rank, and updates that fit into the cache.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use meshstep_bench_cases::copies::MovedBytes;
use meshstep_bench_cases::ranks::{Race, in_turns};
use meshstep_bench_cases::shapes;
use meshstep_bench_cases::step::{StepAndCopy, moved_a_param};
use meshstep_bench_cases::update::case;
use meshstep_comm::Communicator;
use meshstep_optim::{Isa, Norm, NormAccumulator};
use meshstep_parallel3d::models::Gpt2;
use meshstep_shard::Stage;
use meshstep_tensor::{DType, Layout, Threads};
use serde_json::json;

use super::rows::{Aim, PeerTable, Sides};
use crate::measure::effort::Effort;
use crate::measure::peers::TorchPair;
use crate::measure::record::Section;

/// Elements that the updates of one sample pass over together.
const WORK: usize = 4 << 20;

/// Compares updates of vectors that fit into the cache, several in a row for each sample.
pub(super) fn small_updates(section: &mut Section, effort: Effort, torch: &mut TorchPair) -> Result<()> {
    let (rounds, threads) = (effort.pick(3, 21), Threads::shared().count());
    let mut table = PeerTable::new("small updates", Sides::OneProcess);
    for len in [10_000, 100_000, 1_000_000, 4_000_000] {
        let times = (WORK / len).max(1);
        torch.case(json!({ "case": "adamw fused", "length": len, "threads": threads, "times": times }))?;
        let mut case = case("adamw", len)?;
        let race = case.beside(rounds, times, Box::new(|_| torch.run()))?;
        let measured = (race, case.moved().times(len));
        let what = format!("torch adamw fused, one tensor of {len}");
        table.torch_row(section, &what, measured, (Aim::Ratio(1.1), torch));
    }
    table.end(section);
    Ok(())
}

/// Compares clipped steps of one rank with PyTorch's in one process, and with an update and a norm of one vector, which is the work
/// of a step without its organisation.
pub(super) fn steps(section: &mut Section, effort: Effort, torch: &mut TorchPair) -> Result<()> {
    let threads = Threads::shared().count();
    let (count, len) = (16, effort.pick(1 << 14, 1 << 20));
    let mut table = PeerTable::new("a clipped step of one rank", Sides::OneProcess);
    let case =
        json!({ "case": "adamw fused", "count": count, "length": len, "clip": true, "threads": threads });
    torch.case(case)?;
    let race = step(effort, shapes::even(count, len)?, || torch.run())?;
    let what = format!("torch adamw fused, {count} tensors of {len}");
    table.torch_row(section, &what, race, (Aim::Ratio(1.25), torch));
    let (race, moved) = step(effort, shapes::even(count, len)?, update_and_norm(count * len)?)?;
    let what = format!("update and norm alone, {} parameters", count * len);
    table.row(section, &what, (&race, moved), Aim::Ratio(1.0 / 1.15));
    if !effort.quick {
        torch.case(json!({ "case": "adamw fused", "model": "gpt2", "clip": true, "threads": threads }))?;
        let gpt2 = shapes::layout(&Gpt2::SMALL.model(DType::F32).build()?)?;
        let race = step(effort, gpt2, || torch.run())?;
        table.torch_row(section, "torch adamw fused, GPT-2's 148 tensors", race, (Aim::Ratio(1.25), torch));
    }
    table.end(section);
    Ok(())
}

/// Races a step of one rank, and returns the bytes that it moves.
fn step(
    effort: Effort,
    layout: Layout,
    run: impl FnMut() -> Result<f64> + Send,
) -> Result<(Race, MovedBytes)> {
    let params: usize = layout.params().iter().map(|param| param.len()).sum();
    let moved = moved_a_param(1).times(params);
    let own =
        |comm: Arc<dyn Communicator>| StepAndCopy::new(&comm, Stage::Replicated, &layout, moved.total());
    Ok((in_turns((1, effort.pick(3, 11)), moved.total() / 2, own, run)?, moved))
}

/// Returns an update of one vector after the norm of another.
fn update_and_norm(len: usize) -> Result<impl FnMut() -> Result<f64> + Send> {
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
