//! Bytes that a rank holds, by purpose, at each point of a step: planned, counted by the meter, and reported by the system.

use std::sync::Arc;

use anyhow::{Result, anyhow, ensure};
use meshstep_bench_cases::shapes::{STAGES, hand_over, layout};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_parallel3d::models::Gpt2;
use meshstep_shard::{Memory, Optimizer, Options, Outcome, Plan, Stage, StepArgs};
use meshstep_tensor::{Category, DType, Layout, Meter};

use crate::measure::effort::Effort;
use crate::measure::record::{Cell, Plot, Section, Shape, Table, Wanted};
use crate::measure::show::size;
use crate::memory::Process;

const ABOUT: &str = "Peak bytes of one of 2 ranks with AdamW in f32: after construction, with all gradients, and after the step; \
                     counted by the meter, and planned. The system's figure is the growth of this process, divided by the number of \
                     ranks. Models that are too large for this machine are only planned, and marked.";

const RANKS: usize = 2;

/// Categories of a plan and of a measurement, in the order of the report.
const PARTS: [Category; 7] = [
    Category::Params,
    Category::Gathered,
    Category::Grads,
    Category::State,
    Category::Master,
    Category::Buckets,
    Category::Staging,
];

/// Measured bytes of a rank.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    made: u64,
    before: u64,
    after: u64,
    /// Peak bytes by category.
    peaks: [u64; PARTS.len()],
    peak: u64,
    /// Growth of the process, for all ranks.
    process: Option<u64>,
}

pub(crate) fn run(effort: Effort) -> Result<Section> {
    let mut section = Section::new("memory", ABOUT);
    let small = Gpt2 { vocab: 4096, context: 128, hidden: 256, layers: 4 };
    let models: &[(&str, Gpt2)] = &[
        ("a small GPT", small),
        ("GPT-2 small", Gpt2::SMALL),
        ("GPT-2 medium", Gpt2::MEDIUM),
        ("GPT-2 large", Gpt2::LARGE),
        ("GPT-2 XL", Gpt2::XL),
    ];
    let available = if effort.quick { 1 << 30 } else { available() / 3 * 2 };
    let mut wrong = 0;
    for (name, sizes) in models {
        let layout = layout(&sizes.model(DType::F32).build()?)?;
        let elements: usize = layout.params().iter().map(|param| param.len()).sum();
        let title = format!("{name}, {:.1} million parameters", elements as f64 / 1e6);
        let columns = ["planned", "peak", "made", "before the step", "after the step", "process", ""];
        let mut table = Table::new(&title, &columns);
        let mut parts: Vec<(String, Vec<f64>)> =
            PARTS.iter().map(|part| (part.to_string(), Vec::new())).collect();
        let mut any_counted = false;
        for (stage_name, stage) in STAGES {
            let options = Options { stage, ..Options::default() };
            let planned = Plan::new(&layout, RANKS, &options)?.memory(0, &AdamW::default());
            let fits = planned.total() * (RANKS as u64) < available;
            let counted = fits.then(|| measure(&layout, stage)).transpose()?;
            any_counted |= counted.is_some();
            wrong += usize::from(counted.is_some_and(|counted| counted.peaks != by_part(&planned)));
            by_part(&planned)
                .iter()
                .zip(&mut parts)
                .for_each(|(b, (_, values))| values.push(*b as f64 / 1e9));
            table.row(stage_name, cells(&planned, counted));
        }
        parts.retain(|(_, values)| values.iter().any(|value| *value > 0.0));
        section.tables.push(table);
        let names: Vec<String> = STAGES.iter().map(|(name, _)| (*name).to_owned()).collect();
        let totals: Vec<f64> =
            (0..names.len()).map(|i| parts.iter().map(|(_, values)| values[i]).sum()).collect();
        if section.verdict.is_empty() || any_counted {
            section.verdict = vec![saved(name, &names, &totals, any_counted)];
        }
        let caption = format!(
            "Peak of one of {RANKS} ranks, planned before the run{}; less is better. Parts are numbered as in the legend.",
            if any_counted { " and counted in it" } else { ", too large to be run here" }
        );
        let shape = Shape::Bars { label: "memory of a rank, GB".into(), names, parts };
        section.plots.push(Plot::new(format!("Memory: {title}"), caption, shape));
    }
    section.bar(
        "stages with counted peaks that differ from the plan's, by purpose",
        wrong as f64,
        Wanted::AtMost(0.0),
    );
    let exact = match wrong {
        0 => "Every counted peak equals its plan, by purpose and to the byte.".to_owned(),
        wrong => format!("{wrong} counted peaks differ from their plan."),
    };
    section.verdict.push(exact);
    Ok(section)
}

/// Returns a sentence on the stage with the least memory; the first stage is the unsharded one.
fn saved(model: &str, names: &[String], totals: &[f64], counted: bool) -> String {
    let least = totals.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(i, _)| i);
    format!(
        "With {model}, {} needs {} on each of {RANKS} ranks instead of {} unsharded, {:.0}% less ({}).",
        names[least],
        size(1e9 * totals[least]),
        size(1e9 * totals[0]),
        100.0 * (1.0 - totals[least] / totals[0]),
        if counted { "planned, and counted in a run" } else { "planned only" }
    )
}

fn cells(planned: &Memory, counted: Option<Counted>) -> Vec<Cell> {
    let plan = Cell::Bytes(planned.total());
    let Some(Counted { made, before, after, peak, process, peaks }) = counted else {
        return vec![
            plan,
            Cell::None,
            Cell::None,
            Cell::None,
            Cell::None,
            Cell::None,
            Cell::Text("planned only".into()),
        ];
    };
    let process = process.map_or(Cell::None, |bytes| Cell::Bytes(bytes / RANKS as u64));
    let verdict = if peaks == by_part(planned) { "as planned" } else { "NOT AS PLANNED" };
    let verdict = Cell::Text(verdict.into());
    vec![
        plan,
        Cell::Bytes(peak),
        Cell::Bytes(made),
        Cell::Bytes(before),
        Cell::Bytes(after),
        process,
        verdict,
    ]
}

fn by_part(planned: &Memory) -> [u64; PARTS.len()] {
    let planned = planned.by_category();
    PARTS.map(|part| planned.iter().find(|(category, _)| *category == part).map_or(0, |(_, bytes)| *bytes))
}

/// Runs two steps of `layout` with a stage on all ranks; returns the counts of rank 0's meter.
fn measure(layout: &Layout, stage: Stage) -> Result<Counted> {
    let process = Process::watch();
    let counted = loopback::spawn(RANKS, |comm| of_rank(comm, layout, stage, &process))?;
    let counted = counted.into_iter().collect::<Result<Vec<_>>>()?;
    counted.into_iter().next().ok_or_else(|| anyhow!("there are no ranks"))
}

fn of_rank(comm: Arc<dyn Communicator>, layout: &Layout, stage: Stage, process: &Process) -> Result<Counted> {
    let meter = Meter::new();
    let options = Options { stage, meter: meter.clone(), ..Options::default() };
    let ones = |_: &meshstep_tensor::Param, mut values: meshstep_tensor::SliceMut<'_>| {
        values.typed_mut::<f32>()?.fill(1.0);
        Ok(())
    };
    let mut opt = Optimizer::new(Arc::clone(&comm), layout.clone(), AdamW::default(), ones, options)?;
    let mut counted = Counted { made: meter.peak_total(), ..Counted::default() };
    let names: Vec<(String, Option<String>)> =
        opt.params().map(|p| (p.name().to_owned(), p.unit().map(str::to_owned))).collect();
    // The second step uses the memory that the first has allocated.
    for _ in 0..2 {
        forward(&opt)?;
        let batch = opt.micro_batch(1)?;
        let mut gathered = None;
        let mut last: Option<&str> = None;
        for (name, unit) in names.iter().rev() {
            if last != unit.as_deref() {
                last = unit.as_deref();
                // Gather each unit after the unit behind it was read and freed.
                gathered = last.map(|unit| batch.gather(unit)).transpose()?;
            }
            hand_over(&batch, name, |values| values.fill(1.0))?;
        }
        drop(gathered);
        batch.finish()?;
        counted.before = meter.live_total();
        let outcome = opt.step(StepArgs { max_norm: Some(1.0), ..StepArgs::default() })?.outcome()?;
        ensure!(matches!(outcome, Outcome::Applied { .. }), "a step was skipped: {outcome:?}");
    }
    counted.after = meter.live_total();
    counted.peaks = PARTS.map(|part| meter.peak(part));
    counted.peak = meter.peak_total();
    comm.barrier()?;
    let seen = process.seen();
    counted.process = seen.before.zip(seen.peak).map(|(before, peak)| peak.saturating_sub(before));
    comm.barrier()?;
    Ok(counted)
}

/// Gathers every unit in the order of a forward pass.
fn forward(opt: &Optimizer) -> Result<()> {
    let mut held = None;
    let mut last = None;
    for unit in opt.params().map(|param| param.unit()) {
        if unit != last {
            last = unit;
            held = unit.map(|unit| opt.gather(unit)).transpose()?;
        }
    }
    drop(held);
    Ok(())
}

/// Returns the bytes of memory that this machine has available.
fn available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    crate::memory::field(&text, "MemAvailable:").unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_bench_cases::shapes::even;

    #[test]
    fn what_is_counted_is_the_plan_under_every_stage() {
        let layout = even(4, 3000).unwrap();
        for (name, stage) in STAGES {
            let counted = measure(&layout, stage).unwrap();
            let options = Options { stage, ..Options::default() };
            let planned = Plan::new(&layout, RANKS, &options).unwrap().memory(0, &AdamW::default());
            assert_eq!(counted.peaks, by_part(&planned), "{name}");
            assert!(counted.made > 0 && counted.after >= counted.made, "{name}: {counted:?}");
        }
    }
}
