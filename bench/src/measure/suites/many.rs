//! Cost of many parameters and of many units: layouts, optimizers, steps and plans.

use std::time::Instant;

use anyhow::Result;
use meshstep_bench_cases::ranks::{construction, together};
use meshstep_bench_cases::samples::Samples;
use meshstep_bench_cases::shapes::many;
use meshstep_bench_cases::step::{Grads, Steps};
use meshstep_shard::{Options, Owners, Plan, Stage};
use meshstep_tensor::Layout;

use crate::measure::effort::Effort;
use crate::measure::record::{Cell, Section, Table, Wanted};

/// An optimizer to construct.
struct Many {
    name: &'static str,
    ranks: usize,
    count: usize,
    len: usize,
    stage: Stage,
    /// Maximum seconds of the construction.
    wanted: Option<f64>,
}

/// Maximum seconds in which the layout of units is built, and in which the bytes of a pool are computed.
const LAYOUT: f64 = 0.1;
const POOL: f64 = 0.01;

const WHOLE: Stage = Stage::WholeParams(Owners::SortedGreedy);

const OPTIMIZERS: [Many; 6] = [
    Many {
        name: "unsharded",
        ranks: 4,
        count: 100_000,
        len: 100,
        stage: Stage::Replicated,
        wanted: Some(0.5),
    },
    Many { name: "whole parameters", ranks: 4, count: 100_000, len: 100, stage: WHOLE, wanted: Some(0.5) },
    Many { name: "stage 2", ranks: 4, count: 100_000, len: 100, stage: Stage::Zero2, wanted: Some(0.5) },
    Many { name: "stage 3", ranks: 1, count: 64_000, len: 64, stage: Stage::Zero3, wanted: Some(0.3) },
    Many { name: "stage 3", ranks: 4, count: 64_000, len: 64, stage: Stage::Zero3, wanted: None },
    Many {
        name: "unsharded",
        ranks: 1,
        count: 1_000_000,
        len: 16,
        stage: Stage::Replicated,
        wanted: Some(6.0),
    },
];

pub(super) fn run(section: &mut Section, effort: Effort) -> Result<()> {
    let mut table = Table::new("many parameters", &["layout", "construction", "a step"]);
    for Many { name, ranks, count, len, stage, wanted } in OPTIMIZERS {
        // At stage 3 each parameter is a unit.
        let units = stage == Stage::Zero3;
        let (count, rounds) = (count / effort.pick(100, 1), effort.pick(2, 5));
        let (layout, built) = layout(count, len, units, rounds)?;
        let made = construction(ranks, &layout, stage, rounds)?.median();
        let step = if units { Cell::None } else { step(ranks, &layout, stage, rounds)? };
        let things = if units { "units" } else { "parameters" };
        let name = format!("{count} {things} x {len}, {name}, {ranks} ranks");
        if let Some(most) = wanted.filter(|_| !effort.quick) {
            section.bar(format!("construction of {name}, in seconds"), made.median, Wanted::AtMost(most));
        }
        if units && !effort.quick {
            let built = built.median().median;
            section.bar(format!("layout of {name}, in seconds"), built, Wanted::AtMost(LAYOUT));
        }
        table.row(name, [Cell::Time(built.median()), Cell::Time(made), step]);
    }
    table.note("a step: every gradient is handed over by name, then reduced and clipped, then AdamW");
    section.tables.push(table);
    pools(section, effort)
}

fn layout(count: usize, len: usize, units: bool, rounds: usize) -> Result<(Layout, Samples)> {
    let once = || -> Result<(Layout, f64)> {
        let builder = many(count, len, units);
        let start = Instant::now();
        let layout = builder.build()?;
        Ok((layout, start.elapsed().as_secs_f64()))
    };
    let (layout, first) = once()?;
    let others = (1..rounds).map(|_| once().map(|(_, seconds)| seconds));
    Ok((layout, std::iter::once(Ok(first)).chain(others).collect::<Result<_>>()?))
}

fn step(ranks: usize, layout: &Layout, stage: Stage, rounds: usize) -> Result<Cell> {
    let samples = together(ranks, (1, rounds), |comm| Steps::new(&comm, &[stage], layout, Grads::There))?;
    Ok(Cell::Time(samples.into_iter().next().unwrap_or_default().median()))
}

/// Measures the time to plan many parameters at stage 2, and to compute the bytes of gradients in flight.
fn pools(section: &mut Section, effort: Effort) -> Result<()> {
    let (ranks, count, rounds) = (4, effort.pick(300, 30_000), effort.pick(2, 5));
    let (layout, _) = layout(count, 100, false, 1)?;
    let mut table =
        Table::new("plan of many parameters", &["plan", "pool bytes, backward", "pool bytes, forward"]);
    let mut slowest = 0f64;
    for (name, bucket_len) in [("default buckets", None), ("a bucket each", Some(100))] {
        let options = Options { stage: Stage::Zero2, bucket_len, ..Options::default() };
        let (mut made, mut backward, mut forward) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let (plan, seconds) = timed(|| Plan::new(&layout, ranks, &options));
            let plan = plan?;
            made.push(seconds);
            backward.push(timed(|| plan.pool_bytes((0..count).rev())).1);
            forward.push(timed(|| plan.pool_bytes(0..count)).1);
        }
        let [made, backward, forward] =
            [made, backward, forward].map(|seconds| seconds.into_iter().collect::<Samples>().median());
        slowest = slowest.max(backward.median).max(forward.median);
        table.row(format!("{count} parameters, {name}"), [made, backward, forward].map(Cell::Time));
    }
    section.tables.push(table);
    if !effort.quick {
        section.bar(format!("pool bytes of {count} parameters, in seconds"), slowest, Wanted::AtMost(POOL));
    }
    Ok(())
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let done = work();
    (done, start.elapsed().as_secs_f64())
}
