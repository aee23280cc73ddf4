//! Comparisons with one process: updates, steps of many parameters, and L-BFGS.

use std::sync::Arc;

use anyhow::Result;
use meshstep_bench_cases::copies;
use meshstep_bench_cases::peers::Torch;
use meshstep_bench_cases::race::{Contestant, timed};
use meshstep_bench_cases::ranks::{Race, in_turns};
use meshstep_bench_cases::shapes;
use meshstep_bench_cases::step::{StepAndCopy, bytes_a_param};
use meshstep_bench_cases::update::lbfgs::{HISTORY, Iterations};
use meshstep_bench_cases::update::{Case, case};
use meshstep_comm::Communicator;
use meshstep_optim::History;
use meshstep_shard::Stage;
use meshstep_tensor::Threads;
use serde_json::json;

use super::rows::{table, tell};
use crate::measure::effort::Effort;
use crate::measure::peers::Candle;
use crate::measure::record::Section;

/// Number of parameters of GPT-2 small.
const GPT2: usize = 124_439_808;

/// Minimum number of vectors that an iteration of L-BFGS reads. Written vectors are not counted.
const READ: usize = 2 * (2 * HISTORY + 1) + 1 + 3;

pub(super) fn updates(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let mut table = table("updates");
    let threads = Threads::shared().count();
    let (len, rounds) = (effort.pick(1 << 18, 1 << 26), effort.pick(3, 11));
    let gpt2 = effort.pick(None, Some("gpt2"));
    for (rule, theirs, len, model, wanted) in [
        ("adamw", "adamw fused", len, None, 1.15),
        ("sgd, momentum", "sgd fused", len, None, 1.05),
        ("adamw", "adamw foreach", len, None, 4.0),
        ("adamw", "adamw foreach", gpt2.map_or(len, |_| GPT2), gpt2, 8.0),
    ] {
        torch.case(json!({ "case": theirs, "length": len, "model": model, "threads": threads }))?;
        let race = update(rule, len, rounds, || torch.run())?;
        let on = model.map_or_else(|| format!("one tensor of {len}"), |_| "GPT-2's 148 tensors".to_owned());
        tell(section, &mut table, &format!("torch {theirs}, {on}"), &race, wanted);
    }
    section.tables.push(table);
    Ok(())
}

/// Compares a whole clipped step of one rank, its gradients handed over by name, with a clipped step on gradients that are
/// there.
pub(super) fn many(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let (count, len, rounds) = (effort.pick(10_000, 1_000_000), 16, 3);
    let (layout, threads) = (shapes::many(count, len, false).build()?, Threads::shared().count());
    torch.case(
        json!({ "case": "adamw foreach", "count": count, "length": len, "clip": true, "threads": threads }),
    )?;
    let own = |comm: Arc<dyn Communicator>| {
        StepAndCopy::new(&comm, Stage::Replicated, &layout, bytes_a_param(1) * count * len)
    };
    let race = in_turns((1, rounds), own, || torch.run())?;
    let mut table = table("a step of many parameters");
    tell(
        section,
        &mut table,
        &format!("torch adamw foreach, clipped, {count} tensors of {len}"),
        &race,
        10.0,
    );
    section.tables.push(table);
    Ok(())
}

/// Races an update of this library, the other system's update, and a copy of the same bytes.
fn update(rule: &str, len: usize, rounds: usize, mut run: impl FnMut() -> Result<f64>) -> Result<Race> {
    let theirs: Contestant<'_, Case> = Box::new(|_| run());
    Race::run(&mut case(rule, len)?, rounds, [timed(Case::update), theirs, timed(Case::copy)])
}

/// Compares with candle's AdamW, which has only this form.
pub(super) fn candle(section: &mut Section, effort: Effort) -> Result<()> {
    let (len, rounds) = (effort.pick(1 << 18, 1 << 24), effort.pick(3, 11));
    let mut theirs = Candle::new(len)?;
    let race = update("adamw", len, rounds, || theirs.run())?;
    let mut table = table("candle's updates");
    tell(section, &mut table, &format!("candle AdamW, one tensor of {len}"), &race, 20.0);
    section.tables.push(table);
    Ok(())
}

/// Compares one iteration with a full history on `len` parameters; the loss is cheap on both sides.
pub(super) fn lbfgs(section: &mut Section, effort: Effort, torch: &mut Torch) -> Result<()> {
    let (len, rounds) = (effort.pick(100_000, 10_000_000), effort.pick(3, 11));
    torch.case(
        json!({ "case": "lbfgs", "length": len, "history": HISTORY, "threads": Threads::shared().count() }),
    )?;
    let mut own = Iterations::new(len, History::Exact)?;
    let history = vec![1u32; 2 * HISTORY * len];
    let ours = Iterations::contestant(|own: &mut Iterations| own);
    let theirs: Contestant<'_, Iterations> = Box::new(|_| torch.run());
    let least = timed(|_: &mut Iterations| copies::read(&history));
    let mut race = Race::run(&mut own, rounds, [ours, theirs, least])?;
    race.floor = race.floor.times(READ as f64 / (2 * HISTORY) as f64);
    let mut table = table("L-BFGS, one iteration");
    tell(section, &mut table, &format!("torch.optim.LBFGS, history {HISTORY}, {len}"), &race, 3.0);
    table.note(format!(
        "copy: {READ} vectors read, none written: the history twice, because the direction depends on all products with the gradient; \
         the gradient with both; the point; and the three vectors of the loss"
    ));
    section.tables.push(table);
    Ok(())
}
