//! The table of a 7B model in the chapter on stages is the planner's.

use meshstep_optim::AdamW;
use meshstep_parallel3d::{Mesh, Model, Placement, Plan};
use meshstep_shard::{Master, Options, Precision, Stage};
use meshstep_tensor::DType;

const CHAPTER: &str = include_str!("src/stages.md");
const PARAMETERS: usize = 7_000_000_000;
/// Vectors into which `meshstep plan` divides a number of parameters.
const UNITS: usize = 32;

/// Returns the cells of a row of `meshstep plan`: the bytes that a rank holds by purpose, and the bytes that it sends.
fn row(number: usize, stage: Stage) -> Result<Vec<String>, meshstep_parallel3d::Error> {
    let mut model = Model::builder();
    for unit in 0..UNITS {
        let (unit, whole) = (format!("unit{unit}"), Placement::whole());
        model = model.unit(&unit).param(format!("{unit}.w"), &[PARAMETERS / UNITS], DType::BF16, whole);
    }
    let mesh: Mesh = "dp=8".parse()?;
    let precision = Precision { master: Master::F32, ..Precision::default() };
    let options = Options { stage, precision, ..Options::default() };
    let totals = Plan::new(&mesh, &model.build()?, AdamW::default(), &options)?.totals();
    let (held, sent) = (totals.most_held.1, totals.most_sent.1);
    let in_flight = held.buckets + held.gathered + held.staging;
    let bytes =
        [held.params, held.grads, held.state, held.master, in_flight, held.total(), sent.total()].map(rough);
    Ok([number.to_string()].into_iter().chain(bytes).collect())
}

/// Formats bytes as `meshstep plan` does.
fn rough(bytes: u64) -> String {
    let units = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    let unit = units.into_iter().find(|(_, unit)| bytes as f64 >= *unit);
    unit.map_or_else(|| format!("{bytes} B"), |(name, unit)| format!("{:.2} {name}", bytes as f64 / unit))
}

#[test]
fn the_chapter_has_the_planners_table() {
    let (_, block) = CHAPTER.split_once("$ meshstep plan 7e9 --ranks 8\n").unwrap();
    let (block, _) = block.split_once("```").unwrap();
    let cells = |line: &str| -> Vec<String> {
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_owned).collect()
    };
    let lines = block.lines().map(cells).filter(|cells| cells.len() == 8);
    let stages = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];
    let rows = stages.into_iter().enumerate().map(|(number, stage)| row(number, stage).unwrap());
    let expected: Vec<Vec<String>> = rows.collect();
    let found: Vec<Vec<String>> = lines.skip(1).collect();
    assert_eq!(found, expected);
}
