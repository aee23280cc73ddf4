//! Every update rule and recipe compared with a loop that moves the same bytes, and iterations of L-BFGS by type of history.

use anyhow::Result;
use meshstep_bench_cases::race::race;
use meshstep_bench_cases::update::lbfgs::{HISTORY, Iterations};
use meshstep_bench_cases::update::{Case, rows};
use meshstep_optim::History;

use crate::measure::effort::Effort;
use crate::measure::record::{Cell, Plot, Section, Shape, Table, Wanted};
use crate::measure::suites::references;

const ABOUT: &str = "One update of a flat vector, in turns with a loop on as many threads that reads and writes the same bytes in \
                     place: the reference copy, which is no bound, as an update can beat it. Rows are every rule in f32, and AdamW with every recipe. Then an \
                     iteration of L-BFGS with each type of history.";

pub(crate) fn run(effort: Effort) -> Result<Section> {
    let mut section = Section::new("kernels: update rules", ABOUT);
    let (log2, rounds) = (effort.pick(20, 25), effort.pick(5, 21));
    let len = 1usize << log2;
    let mut table = Table::new(
        format!("update of 2^{log2} parameters"),
        &["bytes each", "update", "reference copy", "moved", "of the reference copy's speed", "limit"],
    );
    let mut shares: Vec<(&str, f64)> = Vec::new();
    for row in rows() {
        let mut case = Case::new(row, len)?;
        let (bytes, [copy, update]) = (case.bytes(), case.times(rounds)?);
        let row = case.row;
        let share = copy.median().median / update.median().median;
        let speed = (bytes * len) as f64 / update.median().median;
        shares.push((row.name, share));
        table.row(
            row.name,
            [
                Cell::Count(bytes as u64),
                Cell::Time(update.median()),
                Cell::Time(copy.median()),
                Cell::Speed(speed),
                Cell::Share(share),
                Cell::Share(row.bar / 100.0),
            ],
        );
        if let Some(reason) = row.reason {
            table.note(format!("{}: {reason}", row.name));
        }
        // Small vectors stay in the cache, where the copy is no reference.
        if !effort.quick {
            let what = format!("{}: percent of the reference copy's speed", row.name);
            section.bar(what, 100.0 * share, Wanted::AtLeast(row.bar));
        }
    }
    section.verdict.extend(spread(&shares, "update rules and recipes"));
    section.plots.push(by_share(&shares, "Speed of every update rule"));
    let passes = references::passes(effort)?;
    section.tables.extend([table, references::table("references of these updates", &passes)]);
    section.tables.push(histories(effort)?);
    Ok(section)
}

/// Returns a sentence on the slowest and the fastest of these, if there are any.
pub(super) fn spread(shares: &[(&str, f64)], kind: &str) -> Option<String> {
    let (slow, least) = shares.iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
    let (fast, most) = shares.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(format!(
        "{} {kind} were measured against a reference copy that moves the same bytes: the slowest, \"{slow}\", has {:.0}% of the copy's \
         speed, and the fastest, \"{fast}\", {:.0}%.",
        shares.len(),
        100.0 * least,
        100.0 * most
    ))
}

/// Returns a bar for each of these.
pub(super) fn by_share(shares: &[(&str, f64)], title: &str) -> Plot {
    let names = shares.iter().map(|(name, _)| (*name).to_owned()).collect();
    let parts = vec![("speed".to_owned(), shares.iter().map(|(_, share)| 100.0 * share).collect())];
    let label = "% of the reference copy's speed".to_owned();
    let caption = "More is better; 100% is the speed of a loop that only moves the same bytes.";
    Plot::new(title, caption, Shape::Bars { label, names, parts })
}

/// Compares an iteration of L-BFGS with each type of history; all runs are in turns.
fn histories(effort: Effort) -> Result<Table> {
    let columns = ["f32", "bf16", "f16", "bf16 / f32", "f16 / f32"];
    let mut table = Table::new("L-BFGS, one iteration by type of history", &columns);
    for len in [effort.pick(100_000, 1_000_000), effort.pick(1_000_000, 10_000_000)] {
        let histories = [History::Exact, History::Bf16, History::F16];
        let runs = histories.into_iter().map(|history| Iterations::new(len, history));
        let mut runs = runs.collect::<Result<Vec<_>>>()?;
        let turns = (0..runs.len()).map(|i| Iterations::contestant(move |runs: &mut Vec<_>| &mut runs[i]));
        let samples = race(&mut runs, effort.pick(5, 21), turns.collect())?;
        let [exact, bf16, f16] = &samples[..] else { continue };
        let times = [exact, bf16, f16].map(|samples| Cell::Time(samples.median()));
        let ratios = [bf16, f16].map(|samples| Cell::Ratio(samples.over(exact).median()));
        table.row(format!("{len} parameters, {HISTORY} pairs"), times.into_iter().chain(ratios));
    }
    Ok(table)
}
