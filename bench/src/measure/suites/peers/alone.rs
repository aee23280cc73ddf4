//! Comparisons with one process: updates, steps of many parameters, and L-BFGS.

use std::sync::Arc;

use anyhow::Result;
use meshstep_bench_cases::copies::{MemoryPass, MovedBytes, PASSES, Pages};
use meshstep_bench_cases::race::{Contestant, timed};
use meshstep_bench_cases::ranks::{Race, in_turns};
use meshstep_bench_cases::shapes;
use meshstep_bench_cases::step::{StepAndCopy, moved_a_param};
use meshstep_bench_cases::update::case;
use meshstep_bench_cases::update::lbfgs::{HISTORY, Iterations};
use meshstep_comm::Communicator;
use meshstep_optim::History;
use meshstep_shard::Stage;
use meshstep_tensor::Threads;
use serde_json::json;

use super::rows::{Aim, PeerTable, Sides};
use crate::measure::effort::Effort;
use crate::measure::peers::{Candle, TorchPair};
use crate::measure::record::Section;

/// Number of parameters of GPT-2 small.
const GPT2: usize = 124_439_808;

const HISTORY_VECTORS: usize = 2 * HISTORY;

/// Minimum number of vectors that an iteration of L-BFGS reads. Written vectors are not counted.
const READ: usize = 2 * (HISTORY_VECTORS + 1) + 1 + 3;

/// Elements of the longest vector that L-BFGS is measured on.
const LONGEST: usize = 10_000_000;
/// Least ratio to torch of an iteration of L-BFGS on short vectors.
const IN_CACHE: f64 = 1.3;
/// Share of the speed of reading that an iteration of L-BFGS on long vectors is to reach.
const LBFGS: f64 = 1.0 / 1.3;

/// Share of the reference copy's speed that an update is to reach, as in the suite `kernels`.
const UPDATE: f64 = 0.95;

pub(super) fn updates(section: &mut Section, effort: Effort, torch: &mut TorchPair) -> Result<()> {
    let mut table = PeerTable::new("updates", Sides::OneProcess);
    let threads = Threads::shared().count();
    let (len, rounds) = (effort.pick(1 << 18, 1 << 26), effort.pick(3, 11));
    let gpt2 = effort.pick(None, Some("gpt2"));
    for (rule, theirs, len, model) in [
        ("adamw", "adamw fused", len, None),
        ("sgd, momentum", "sgd fused", len, None),
        ("adamw", "adamw foreach", len, None),
        ("adamw", "adamw foreach", gpt2.map_or(len, |_| GPT2), gpt2),
    ] {
        torch.case(json!({ "case": theirs, "length": len, "model": model, "threads": threads }))?;
        let race = update(rule, len, rounds, || torch.run())?;
        let on = model.map_or_else(|| format!("one tensor of {len}"), |_| "GPT-2's 148 tensors".to_owned());
        let aim = Aim::OfReference(UPDATE);
        table.torch_row(section, &format!("torch {theirs}, {on}"), race, (aim, torch));
    }
    table.end(section);
    Ok(())
}

/// Compares a whole clipped step of one rank, its gradients handed over by name, with a clipped step on gradients that are
/// there.
pub(super) fn many(section: &mut Section, effort: Effort, torch: &mut TorchPair) -> Result<()> {
    let (count, len, rounds) = (effort.pick(10_000, 1_000_000), 16, 3);
    let (layout, threads) = (shapes::many(count, len, false).build()?, Threads::shared().count());
    torch.case(
        json!({ "case": "adamw foreach", "count": count, "length": len, "clip": true, "threads": threads }),
    )?;
    let moved = moved_a_param(1).times(count * len);
    let own =
        |comm: Arc<dyn Communicator>| StepAndCopy::new(&comm, Stage::Replicated, &layout, moved.total());
    let race = in_turns((1, rounds), moved.total() / 2, own, || torch.run())?;
    let mut table = PeerTable::new("a step of many parameters", Sides::OneProcess);
    let what = format!("torch adamw foreach, clipped, {count} tensors of {len}");
    table.torch_row(section, &what, (race, moved), (Aim::Ratio(10.0), torch));
    table.end(section);
    Ok(())
}

/// Races an update of this library, the other system's update, and the references. Also returns the bytes of an update.
fn update(
    rule: &str,
    len: usize,
    rounds: usize,
    mut run: impl FnMut() -> Result<f64>,
) -> Result<(Race, MovedBytes)> {
    let mut case = case(rule, len)?;
    let race = case.beside(rounds, 1, Box::new(|_| run()))?;
    Ok((race, case.moved().times(len)))
}

/// Compares with candle's AdamW, which has only this form.
pub(super) fn candle(section: &mut Section, effort: Effort) -> Result<()> {
    let (len, rounds) = (effort.pick(1 << 18, 1 << 24), effort.pick(3, 11));
    let mut theirs = Candle::new(len)?;
    let (race, moved) = update("adamw", len, rounds, || theirs.run())?;
    let mut table = PeerTable::new("candle's updates", Sides::OneProcess);
    let what = format!("candle AdamW, one tensor of {len}");
    table.row(section, &what, (&race, moved), Aim::OfReference(UPDATE));
    table.end(section);
    Ok(())
}

/// Compares one iteration with a full history; the loss is cheap on both sides, and allocates nothing.
pub(super) fn lbfgs(section: &mut Section, effort: Effort, torch: &mut TorchPair) -> Result<()> {
    let mut table = PeerTable::new("L-BFGS, one iteration", Sides::OneProcess);
    for (len, aim) in [
        (effort.pick(10_000, 100_000), Aim::Ratio(IN_CACHE)),
        (effort.pick(20_000, 1_000_000), Aim::Ratio(IN_CACHE)),
        (effort.pick(40_000, 3_000_000), Aim::Ratio(IN_CACHE)),
        (effort.pick(80_000, LONGEST), Aim::OfReference(LBFGS)),
    ] {
        let case = json!({ "case": "lbfgs", "length": len, "history": HISTORY, "threads": Threads::shared().count() });
        torch.case(case)?;
        // As many elements for each length, but for the shortest: an iteration of milliseconds is at the mercy of its neighbours.
        let rounds = effort.pick(3, (11 * LONGEST / len).min(101));
        let race = iteration(len, rounds, || torch.run())?;
        let moved = MovedBytes { read: 4 * READ * len, ..MovedBytes::default() };
        let what = format!("torch.optim.LBFGS, history {HISTORY}, {len}");
        table.torch_row(section, &what, (race, moved), (aim, torch));
    }
    table.note(format!(
        "copy: {READ} vectors read, none written: the history twice, because the direction depends on all products with the gradient; \
         the gradient with both; the point; and the three vectors of the loss"
    ));
    table.end(section);
    Ok(())
}

/// Races iterations on `len` parameters, the other system's, and the references.
fn iteration(len: usize, rounds: usize, mut run: impl FnMut() -> Result<f64>) -> Result<Race> {
    let pages = Pages::new(HISTORY_VECTORS * 4 * len)?;
    let mut own = Own { pages, run: Iterations::new(len, History::Exact)? };
    let ours = Iterations::contestant(|own: &mut Own| &mut own.run);
    let theirs: Contestant<'_, Own> = Box::new(|_| run());
    let pass = |pass: MemoryPass| timed(move |own: &mut Own| own.pages.pass(pass, &Threads::shared()));
    let [read, write, in_place] = PASSES.map(pass);
    let turns = [ours, theirs, pass(MemoryPass::Read), read, write, in_place];
    let mut race = Race::run(&mut own, rounds, turns, HISTORY_VECTORS * 4 * len)?;
    race.copy = race.copy.times(READ as f64 / HISTORY_VECTORS as f64);
    Ok(race)
}

/// An L-BFGS run, and memory as large as its history for the reference.
struct Own {
    pages: Pages,
    run: Iterations,
}
