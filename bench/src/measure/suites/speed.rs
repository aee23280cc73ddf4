//! Whole steps, unsharded and with every stage, on the same gradients.

use anyhow::Result;
use meshstep_bench_cases::copies::{MemoryPass, PassTimes};
use meshstep_bench_cases::ranks::{Player as _, together};
use meshstep_bench_cases::samples::Samples;
use meshstep_bench_cases::shapes::{STAGES, even};
use meshstep_bench_cases::step::slots::SlotSteps;
use meshstep_bench_cases::step::{Grads, Steps, bytes_a_param, moved_a_param};
use meshstep_tensor::Layout;

use crate::measure::effort::Effort;
use crate::measure::record::{Cell, Plot, Section, Shape, Table, Wanted};
use crate::measure::show::time_compared;
use crate::measure::suites::references;
use crate::measure::suites::spans::{self, Spans};

const ABOUT: &str = "A step on 4 ranks: gradients are handed over, reduced and clipped by their norm, then AdamW, then parameters are \
                     gathered. Ranks are threads of this process. Overhead is relative to the unsharded step, round by round, with its \
                     95% interval.";

const RANKS: usize = 4;

/// Maximum ratio of a step to the copy of its bytes, and of stages 1 and 2 to stage 0.
const OVER_COPY: f64 = 1.5;
const OVER_UNSHARDED: f64 = 1.02;
/// Maximum ratio of an unclipped step in one pass to one that reduces first.
const ONE_PASS: f64 = 0.95;
/// Maximum ratio of a step over slots to an ordinary one.
const OVER_MEAN: f64 = 1.15;

pub(crate) fn run(effort: Effort) -> Result<Section> {
    let mut section = Section::new("speed of a step", ABOUT);
    let (count, len) = (16, effort.pick(1 << 15, 1 << 20));
    let layout = even(count, len)?;
    let rounds = effort.pick(5, 21);
    let stages = STAGES.map(|(_, stage)| stage);
    let passes = references::passes(effort)?;
    let copy = 1.0 / passes.speed(MemoryPass::InPlace);
    for (title, grads) in [("gradients in place", Grads::There), ("gradients computed", Grads::Computed(16))]
    {
        let samples =
            together(RANKS, (stages.len(), rounds), |comm| Steps::new(&comm, &stages, &layout, grads))?;
        let least = (grads == Grads::There).then(|| (bytes_a_param(RANKS) * count * len) as f64 * copy);
        tell(&mut section, title, &samples, least);
    }
    let unclipped = together(RANKS, (2, rounds), |comm| Steps::unclipped(&comm, &layout))?;
    in_one_pass(&mut section, &unclipped);
    over_slots(&mut section, &layout, effort)?;
    section.tables.push(references(&passes, count * len));
    section.bars.retain(|_| !effort.quick);
    let (table, plot) = where_it_goes(&layout, effort)?;
    section.tables.push(table);
    section.plots.push(plot);
    Ok(section)
}

/// Compares unclipped steps that reduce, update and gather in one pass with those that reduce first.
fn in_one_pass(section: &mut Section, samples: &[Samples]) {
    let title = format!("{RANKS} ranks, stage 1, gradients of any kind, unclipped");
    let mut table = Table::new(title, &["a step", "over reducing first"]);
    for (name, own) in ["reduced first", "reduced, updated and gathered in one pass"].iter().zip(samples) {
        table.row(*name, [Cell::Time(own.median()), Cell::Ratio(own.over(&samples[0]).median())]);
    }
    let found = samples[1].over(&samples[0]).median().median;
    section.bar(
        "an unclipped step in one pass: ratio to reducing first".to_owned(),
        found,
        Wanted::AtMost(ONE_PASS),
    );
    section.tables.push(table);
}

/// Compares steps over slots with ordinary ones of as many micro-batches.
fn over_slots(section: &mut Section, layout: &Layout, effort: Effort) -> Result<()> {
    let title = format!("{RANKS} ranks, stage 1, sums over slots");
    let mut table = Table::new(title, &["ordinary mean", "over slots", "ratio"]);
    for batches in [1, 2] {
        let samples =
            together(RANKS, (2, effort.pick(3, 21)), |comm| SlotSteps::new(&comm, layout, batches))?;
        let name = format!("{} slots", RANKS * batches);
        let ratio = samples[1].over(&samples[0]).median();
        let found = ratio.median;
        let times = [0, 1].map(|turn| Cell::Time(samples[turn].median()));
        table.row(&name, times.into_iter().chain([Cell::Ratio(ratio)]));
        section.bar(format!("{name}: ratio to the ordinary mean"), found, Wanted::AtMost(OVER_MEAN));
    }
    table.note("gradients are in place with one micro-batch on each rank, and copied with two");
    section.tables.push(table);
    Ok(())
}

/// Returns the speeds of the passes, and what they make of the bytes of a step with `params` parameters.
fn references(passes: &PassTimes, params: usize) -> Table {
    let moved = moved_a_param(RANKS).times(params);
    let mut table = references::table("references of these steps", passes);
    let priced = passes.price(moved).median();
    let (bytes, speed) = (moved.total(), moved.total() as f64 / priced.median);
    let cells = [Cell::Bytes(bytes as u64), Cell::Time(priced), Cell::Speed(speed)];
    table.row("the bytes of stage 1, each at the speed of its pass", cells);
    table
}

fn tell(section: &mut Section, title: &str, samples: &[Samples], least: Option<f64>) {
    let mut table = Table::new(
        format!("{RANKS} ranks, {title}"),
        &["a step", "reference copy", "over the reference copy", "overhead against unsharded"],
    );
    for ((name, _), own) in STAGES.iter().zip(samples) {
        let (time, over) = (own.median(), own.over(&samples[0]));
        let overhead: Samples = over.minus(1.0);
        let copy = least.map_or(Cell::None, Cell::Seconds);
        let times_copy = least.map_or(Cell::None, |least| Cell::Number(time.median / least));
        table.row(*name, [Cell::Time(time), copy, times_copy, Cell::Overhead(overhead.median())]);
    }
    let compared = |i: usize| time_compared(&samples[i].over(&samples[0]).median());
    section.verdict.push(format!(
        "A step of {RANKS} ranks, {title}, compared with the unsharded one: stage 1 needs {}, stage 2 {}.",
        compared(2),
        compared(3)
    ));
    if let Some(least) = least {
        table.note(format!(
            "reference copy: {} bytes per parameter at the speed of a copy in place in this run",
            bytes_a_param(RANKS)
        ));
        let found = samples[2].median().median / least;
        section.bar(
            format!("stage 1, {title}: ratio to the reference copy"),
            found,
            Wanted::AtMost(OVER_COPY),
        );
    } else {
        for (i, stage) in [(2, "stage 1"), (3, "stage 2")] {
            let found = samples[i].over(&samples[0]).median().median;
            section.bar(format!("{stage}, {title}: ratio to stage 0"), found, Wanted::AtMost(OVER_UNSHARDED));
        }
    }
    section.tables.push(table);
}

/// Measures rank 0's time by the spans of a step, in separate steps, so that the measurement does not slow down the timed
/// steps.
fn where_it_goes(layout: &Layout, effort: Effort) -> Result<(Table, Plot)> {
    let stages = STAGES.map(|(_, stage)| stage);
    let steps = effort.pick(3, 10);
    let watched = spans::of_rank_zero(RANKS, |comm| {
        let mut player = Steps::new(&comm, &stages, layout, Grads::There)?;
        (0..stages.len())
            .map(|turn| spans::watch(|| (0..steps).try_for_each(|_| player.play(turn))))
            .collect()
    })?;
    let columns: Vec<&str> = Spans::NAMES.iter().copied().chain(["the rest", "a step"]).collect();
    let mut table = Table::new("where rank 0's time goes", &columns);
    let mut parts: Vec<(String, Vec<f64>)> =
        columns[..columns.len() - 1].iter().map(|&name| (name.to_owned(), Vec::new())).collect();
    for ((name, _), spans) in STAGES.iter().zip(&watched) {
        let each: Vec<f64> = spans.parts().iter().map(|seconds| seconds / steps as f64).collect();
        parts.iter_mut().zip(&each).for_each(|((_, values), seconds)| values.push(seconds * 1e3));
        table.row(*name, each.iter().copied().chain([each.iter().sum()]).map(Cell::Seconds));
    }
    table.note("reduce, exchange and gather include the waits for the other ranks and their data; the norm is taken during reduce");
    let names = STAGES.iter().map(|(name, _)| (*name).to_owned()).collect();
    let caption = "Rank 0 in the mean of a few steps; less is better. Parts are numbered as in the legend, from left to right.";
    let shape = Shape::Bars { label: "time of a step, ms".into(), names, parts };
    let plot = Plot::new("Where a step's time goes", caption, shape);
    Ok((table, plot))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_takes_steps_from_gradients_of_both_kinds() {
        let layout = even(3, 200).unwrap();
        let stages = STAGES.map(|(_, stage)| stage);
        for grads in [Grads::There, Grads::Computed(2)] {
            let samples = together(2, (5, 2), |comm| Steps::new(&comm, &stages, &layout, grads)).unwrap();
            assert!(samples.len() == 5 && samples.iter().all(|samples| samples.median().rounds == 2));
        }
    }
}
