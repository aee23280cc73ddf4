//! Cost against parameters and against ranks, of an empty step and of plans; and predicted steps of clusters.

use std::time::Instant;

use anyhow::Result;
use meshstep_bench_cases::collectives::operations;
use meshstep_bench_cases::ranks::together;
use meshstep_bench_cases::samples::Samples;
use meshstep_bench_cases::shapes::{STAGES, even};
use meshstep_bench_cases::step::{Grads, Steps};
use meshstep_bench_cases::update::case;
use meshstep_optim::AdamW;
use meshstep_parallel3d::{Mesh, Plan, models::Llama3};
use meshstep_shard::{Master, Options, Precision, Stage};
use meshstep_tensor::DType;

use super::{comm, many};
use crate::measure::effort::Effort;
use crate::measure::record::{Cell, Plot, Scale, Section, Shape, Table, Wanted};
use crate::measure::show::size;

const ABOUT: &str = "Updates by size in turns with a copy of the same bytes; steps by ranks, which share this machine's cores; a step with \
                     almost no data; many small parameters; plans of clusters; a model that is fitted to collectives; and predictions for clusters from published \
                     speeds of links.";

/// From this number of parameters on the cost per parameter must be constant, within this margin.
const FLAT_FROM: usize = 10_000_000;
const FLAT: f64 = 0.15;

pub(crate) fn run(effort: Effort) -> Result<Section> {
    let mut section = Section::new("scaling", ABOUT);
    by_parameters(&mut section, effort)?;
    by_ranks(&mut section, effort)?;
    empty(&mut section, effort)?;
    many::run(&mut section, effort)?;
    plans(&mut section, effort.pick(&[1024, 100_000][..], &[1024, 16_384, 100_000]))?;
    predictions(&mut section, effort)?;
    Ok(section)
}

fn by_parameters(section: &mut Section, effort: Effort) -> Result<()> {
    let lens: &[usize] = effort.pick(
        &[100_000, 1_000_000, 4_000_000],
        &[100_000, 1_000_000, 10_000_000, 30_000_000, 100_000_000, 300_000_000],
    );
    let mut table =
        Table::new("AdamW in f32", &["update", "reference copy", "a parameter", "update / reference copy"]);
    let (mut update_curve, mut copy_curve, mut flat) = (Vec::new(), Vec::new(), Vec::new());
    for (place, &len) in lens.iter().enumerate() {
        let [copy, update] =
            case("adamw", len)?.times(if len > FLAT_FROM { 7 } else { effort.pick(5, 21) })?;
        let over = update.over(&copy).median();
        let time = update.median();
        if len >= FLAT_FROM {
            flat.push(over.median);
        }
        update_curve.push((place as f64, time.median / len as f64 * 1e9));
        copy_curve.push((place as f64, copy.median().median / len as f64 * 1e9));
        table.row(
            format!("{len}"),
            [
                Cell::Time(time),
                Cell::Time(copy.median()),
                Cell::Text(format!("{:.3} ns", time.median / len as f64 * 1e9)),
                Cell::Ratio(over),
            ],
        );
    }
    section.tables.push(table);
    if let (Some((_, ns)), Some(len)) = (update_curve.last(), lens.last()) {
        let millions = *len as f64 / 1e6;
        section.verdict.push(format!(
            "With {millions:.0} million parameters an AdamW update takes {ns:.2} ns for each."
        ));
    }
    let x = Scale::named("parameters, millions", lens.iter().map(|len| format!("{}", *len as f64 / 1e6)));
    let y = Scale::amount("time of a parameter, ns");
    let curves = vec![
        ("update".to_owned(), update_curve),
        ("reference copy of the same bytes".to_owned(), copy_curve),
    ];
    let caption =
        "Less is better. Small vectors stay in the processor's cache, and the left end may be lower.";
    section.plots.push(Plot::new("Cost of an AdamW update", caption, Shape::Curves { x, y, curves }));
    if let (Some(least), Some(most)) =
        (flat.iter().copied().reduce(f64::min), flat.iter().copied().reduce(f64::max))
    {
        let what = format!("update / reference copy from {FLAT_FROM} parameters on: most / least");
        section.bar(what, most / least, Wanted::AtMost(1.0 + FLAT));
    }
    Ok(())
}

fn by_ranks(section: &mut Section, effort: Effort) -> Result<()> {
    let layout = even(8, effort.pick(1 << 14, 1 << 19))?;
    let stages = [Stage::Replicated, Stage::Zero1, Stage::Zero2];
    let mut table = Table::new("a step by ranks", &["unsharded", "stage 1", "stage 2"]);
    let mut curves: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    let worlds = [1usize, 2, 4, 8, 16];
    for (place, ranks) in worlds.into_iter().enumerate() {
        let rounds = effort.pick(3, 9);
        let samples = together(ranks, (stages.len(), rounds), |comm| {
            Steps::new(&comm, &stages, &layout, Grads::There)
        })?;
        for (name, samples) in ["unsharded", "stage 1", "stage 2"].iter().zip(&samples) {
            comm::point(&mut curves, name, (place as f64, samples.median().median * 1e3));
        }
        table.row(format!("{ranks} ranks"), samples.iter().map(|samples| Cell::Time(samples.median())));
    }
    table.note("each rank has its own gradients and parameters, so the bytes grow with the ranks, while the number of cores is constant");
    section.tables.push(table);
    let x = Scale::named("ranks", worlds.iter().map(usize::to_string));
    let y = Scale::amount("time of a step, ms");
    let caption = "Less is better. All ranks share the cores of this machine, and each adds its own bytes, so the time grows with them.";
    section.plots.push(Plot::new("A step by ranks", caption, Shape::Curves { x, y, curves }));
    Ok(())
}

/// Measures a step of one parameter with one element: the cost of a step without its bytes.
fn empty(section: &mut Section, effort: Effort) -> Result<()> {
    let layout = even(1, 1)?;
    let names: Vec<&str> = STAGES.iter().map(|(name, _)| *name).collect();
    let stages = STAGES.map(|(_, stage)| stage);
    let mut table = Table::new("a step of one number", &names);
    for ranks in [1, 2, 4] {
        let rounds = effort.pick(50, 500);
        let samples = together(ranks, (stages.len(), rounds), |comm| {
            Steps::new(&comm, &stages, &layout, Grads::There)
        })?;
        table.row(format!("{ranks} ranks"), samples.iter().map(|samples| Cell::Time(samples.median())));
    }
    section.tables.push(table);
    Ok(())
}

/// Plans clusters as meshes of 8 tensor-parallel ranks, and measures the time to plan for all of their ranks.
fn plans(section: &mut Section, clusters: &[usize]) -> Result<()> {
    let model = Llama3::B405.model(DType::BF16, 1).build()?;
    let mut table = Table::new("plan of Llama 3 405B", &["time", "most on a rank", "sent by all in a step"]);
    let mut slowest = 0f64;
    for ranks in clusters {
        let mesh: Mesh = format!("dp={},tp=8", ranks / 8).parse()?;
        let start = Instant::now();
        let plan = Plan::new(&mesh, &model, AdamW::default(), &mixed(Stage::Zero1))?;
        let totals = plan.totals();
        let seconds = start.elapsed().as_secs_f64();
        slowest = slowest.max(seconds);
        let most = Cell::Bytes(totals.most_held.1.total());
        table.row(format!("{ranks} ranks"), [Cell::Seconds(seconds), most, Cell::Bytes(totals.wire.total())]);
    }
    section.tables.push(table);
    let largest = clusters.iter().max().unwrap_or(&0);
    section
        .verdict
        .push(format!("The slowest plan of a cluster, of up to {largest} ranks, is made in {slowest:.2} s."));
    section.bar("slowest plan, in seconds", slowest, Wanted::AtMost(1.0));
    Ok(())
}

fn mixed(stage: Stage) -> Options {
    let precision = Precision { master: Master::F32, ..Precision::default() };
    Options { stage, precision, ..Options::default() }
}

/// Maximum relative difference of a fitted model from the measured times; a model that differs more is left out.
const NEAR: f64 = 0.15;

/// Time model of a collective: a start-up time and a time per byte.
#[derive(Clone, Copy, Debug, PartialEq)]
struct AlphaBeta {
    alpha: f64,
    beta: f64,
}

impl AlphaBeta {
    /// Fits the line through points (bytes, seconds) by least squares of the relative errors.
    fn fit(points: &[(f64, f64)]) -> AlphaBeta {
        // Normal equations of alpha + beta x = y, weighted by 1/seconds^2.
        let sum = |of: &dyn Fn(f64, f64) -> f64| points.iter().map(|&(x, y)| of(x, y) / (y * y)).sum::<f64>();
        let (w, x, xx) = (sum(&|_, _| 1.0), sum(&|x, _| x), sum(&|x, _| x * x));
        let (y, xy) = (sum(&|_, y| y), sum(&|x, y| x * y));
        let determinant = w * xx - x * x;
        AlphaBeta { alpha: (y * xx - x * xy) / determinant, beta: (w * xy - x * y) / determinant }
    }

    fn at(self, bytes: f64) -> f64 {
        self.alpha + self.beta * bytes
    }

    /// Returns the largest relative difference from the points.
    fn off(self, points: &[(f64, f64)]) -> f64 {
        let larger = |most: f64, off: f64| if off.is_nan() || off > most { off } else { most };
        points.iter().map(|&(x, y)| (self.at(x) / y - 1.0).abs()).fold(0.0, larger)
    }

    /// Returns the cells of a row: the model if it is near all points, else a word instead.
    fn cells(self, points: &[(f64, f64)]) -> [Cell; 3] {
        let off = self.off(points);
        // NaN, of a degenerate fit, is not near.
        if off <= NEAR {
            [Cell::Seconds(self.alpha), Cell::Speed(1.0 / self.beta), Cell::Share(off)]
        } else {
            [Cell::Text("left out".to_owned()), Cell::None, Cell::Share(off)]
        }
    }
}

/// Links with their published speeds in each direction: NVLink 4 of an H100 has 450 GB/s (NVIDIA H100 datasheet), NDR
/// InfiniBand 400 Gb/s per port. Start-up times are estimates, of the order that NCCL's authors publish for a step of a
/// ring.
const LINKS: [(&str, AlphaBeta); 2] = [
    ("NVLink 4, 8 ranks", AlphaBeta { alpha: 3e-6, beta: 1.0 / 450e9 }),
    ("InfiniBand NDR, 64 ranks", AlphaBeta { alpha: 8e-6, beta: 1.0 / 50e9 }),
];

fn predictions(section: &mut Section, effort: Effort) -> Result<()> {
    let (ranks, rounds) = (4, effort.pick(5, 15));
    let sizes: &[usize] =
        effort.pick(&[64 << 10, 512 << 10, 4 << 20], &[256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]);
    let mut measured: Vec<(usize, Vec<Samples>)> = Vec::new();
    for &bytes in sizes {
        measured.push((bytes, comm::measure(ranks, bytes, rounds)?));
    }
    let mut fitted = Table::new(
        format!("alpha + beta x bytes, fitted on {ranks} loopback ranks"),
        &["alpha", "1/beta", "off at most"],
    );
    for (i, (name, ..)) in operations(ranks).into_iter().enumerate() {
        let points: Vec<(f64, f64)> =
            measured.iter().map(|(bytes, samples)| (*bytes as f64, samples[i].median().median)).collect();
        let line = AlphaBeta::fit(&points);
        fitted.row(name, line.cells(&points));
    }
    fitted
        .note(format!("a model is left out where it is more than {:.0}% off a measured time", 100.0 * NEAR));
    section.tables.push(fitted);
    let mut table =
        Table::new("PREDICTED, not measured: what a step of Llama 3 8B waits for", &["sent", "predicted"]);
    let model = Llama3::B8.model(DType::BF16, 1).build()?;
    for ((name, link), ranks) in LINKS.into_iter().zip([8, 64]) {
        let mesh: Mesh = format!("dp={ranks}").parse()?;
        for stage in [Stage::Zero1, Stage::Zero2] {
            let plan = Plan::new(&mesh, &model, AdamW::default(), &mixed(stage))?;
            let sent = plan.rank(0)?.wire().total();
            let buckets = plan.pipeline().iter().flat_map(|stage| stage.plan().buckets()).count() as f64;
            // A ring takes n - 1 steps to reduce a bucket, and as many to gather it.
            let steps = 2.0 * (f64::from(ranks) - 1.0) * buckets;
            let seconds = steps * link.alpha + sent as f64 * link.beta;
            let label = if stage == Stage::Zero1 { "stage 1" } else { "stage 2" };
            table.row(format!("{name}, {label}"), [Cell::Bytes(sent), Cell::Seconds(seconds)]);
        }
    }
    for (name, AlphaBeta { alpha, beta }) in LINKS {
        let speed = size(1.0 / beta);
        table.note(format!(
            "{name}: assumes {:.0} us per step of a ring and {speed}/s, and no overlap",
            alpha * 1e6
        ));
    }
    section.tables.push(table);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again() {
        let line = AlphaBeta { alpha: 2e-6, beta: 1e-10 };
        let points: Vec<(f64, f64)> = [1e3, 1e5, 1e6, 1e8].iter().map(|&x| (x, line.at(x))).collect();
        let found = AlphaBeta::fit(&points);
        assert!((found.alpha / line.alpha - 1.0).abs() < 1e-6 && (found.beta / line.beta - 1.0).abs() < 1e-6);
    }

    #[test]
    fn a_model_is_shown_only_where_it_is_near_the_measured_times() {
        let line = AlphaBeta { alpha: 0.0, beta: 1e-9 };
        let cells = |factor: f64| line.cells(&[(1e6, 1e-3), (2e6, 2e-3 / factor)]);
        for factor in [1.14, 0.86] {
            assert_eq!(cells(factor)[0], Cell::Seconds(0.0), "{factor}");
        }
        for factor in [1.16, 0.84, f64::NAN] {
            assert_eq!(cells(factor)[..2], [Cell::Text("left out".to_owned()), Cell::None], "{factor}");
        }
    }

    #[test]
    fn plans_of_clusters_are_made_in_time() {
        let mut section = Section::new("", "");
        // In long runs one of them is larger.
        plans(&mut section, if meshstep_cases::long() { &[1024, 100_000] } else { &[64, 1024] }).unwrap();
        assert_eq!(section.tables[0].rows.len(), 2);
    }
}
