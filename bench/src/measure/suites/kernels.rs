//! Every update rule and recipe compared with a loop that moves the same bytes.

use anyhow::Result;
use meshstep_bench_cases::update::{Case, rows};

use crate::measure::effort::Effort;
use crate::measure::record::{Cell, Section, Table, Wanted};
use crate::measure::suites::references;

const ABOUT: &str = "One update of a flat vector, in turns with a loop on as many threads that reads and writes the same bytes in \
                     place. Rows are every rule in f32, and AdamW with every recipe.";

pub(crate) fn run(effort: Effort) -> Result<Section> {
    let mut section = Section::new("kernels", ABOUT);
    let (log2, rounds) = (effort.pick(20, 25), effort.pick(5, 21));
    let len = 1usize << log2;
    let mut table = Table::new(
        format!("update of 2^{log2} parameters"),
        &["bytes each", "update", "copy", "moved", "of the copy's speed", "bar"],
    );
    for row in rows() {
        let mut case = Case::new(row, len)?;
        let (bytes, [copy, update]) = (case.bytes(), case.times(rounds)?);
        let row = case.row;
        let share = copy.median().median / update.median().median;
        let speed = (bytes * len) as f64 / update.median().median;
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
            let what = format!("{}: percent of the copy's speed", row.name);
            section.bar(what, 100.0 * share, Wanted::AtLeast(row.bar));
        }
    }
    let passes = references::passes(effort)?;
    section.tables.extend([table, references::table("references of these updates", &passes)]);
    Ok(section)
}
