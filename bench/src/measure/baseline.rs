//! Compares a report with an earlier one of the same machine: finds times that became slower beyond the noise.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

use super::record::{Cell, FORMAT, Report, Section, Table, Wanted};
use meshstep_bench_cases::machine::Machine;
use meshstep_bench_cases::samples::Median;

/// Relative margin by which the whole interval of a time must lie above the baseline's to count as slower.
const BEYOND: f64 = 0.05;

/// The fields that are read first, because a report of another format may have any other fields.
#[derive(Deserialize)]
struct Form {
    format: u32,
    version: String,
}

/// Reads a report that this run can be compared with; fails if it cannot.
pub(crate) fn read(path: &Path, quick: bool, machine: &Machine) -> Result<Report> {
    let shown = path.display();
    let text = fs::read(path).with_context(|| format!("--baseline {shown}: cannot read it"))?;
    let form: Form = serde_json::from_slice(&text)
        .with_context(|| format!("--baseline {shown}: give a report.json that `cargo xtask bench` wrote"))?;
    ensure!(
        form.format == FORMAT,
        "--baseline {shown}: Meshstep {} wrote it in format {}, but this program reads format {FORMAT}; measure it again",
        form.version,
        form.format
    );
    let baseline: Report = serde_json::from_slice(&text)
        .with_context(|| format!("--baseline {shown}: the report is incomplete"))?;
    if let Some(differs) = machine.differs(&baseline.machine) {
        bail!("--baseline {shown}: it is from another machine ({differs})");
    }
    ensure!(
        baseline.quick == quick,
        "--baseline {shown}: it was measured {} --quick, unlike this run",
        if baseline.quick { "with" } else { "without" }
    );
    Ok(baseline)
}

/// Compares every time of both reports, with the bar that none is slower.
pub(crate) fn compare(report: &Report, baseline: &Report) -> Section {
    let about = format!(
        "Times compared with those of Meshstep {} on this machine. Slower: the whole interval is over {:.0}% above the baseline's.",
        baseline.version,
        BEYOND * 100.0
    );
    let mut section = Section::new("baseline", &about);
    let before: HashMap<String, Median> = times(baseline).collect();
    let mut table = Table::new("what", &["now", "then", "now/then", ""]);
    let mut slower = 0;
    for (name, now) in times(report) {
        let Some(then) = before.get(&name) else { continue };
        let verdict = verdict(&now, then);
        slower += usize::from(verdict == "SLOWER");
        let ratio = Cell::Number(now.median / then.median);
        table.row(name, [Cell::Time(now), Cell::Time(*then), ratio, Cell::Text(verdict.to_owned())]);
    }
    if table.rows.is_empty() {
        table.note("the baseline has none of these times");
    }
    section.verdict.push(format!(
        "Of {} times that both reports have, {slower} are slower than with Meshstep {}.",
        table.rows.len(),
        baseline.version
    ));
    section.tables.push(table);
    section.bar("times that became slower", slower as f64, Wanted::AtMost(0.0));
    section
}

fn verdict(now: &Median, then: &Median) -> &'static str {
    if now.low > then.high * (1.0 + BEYOND) {
        "SLOWER"
    } else if now.high * (1.0 + BEYOND) < then.low {
        "faster"
    } else {
        ""
    }
}

/// Returns the measured times, named by suite, table, row and column.
fn times(report: &Report) -> impl Iterator<Item = (String, Median)> {
    let tables = report.sections.iter().flat_map(|part| part.tables.iter().map(move |table| (part, table)));
    tables.flat_map(|(part, table)| {
        table.rows.iter().flat_map(move |row| {
            row.cells.iter().zip(&table.columns).filter_map(move |(cell, column)| match cell {
                Cell::Time(time) => {
                    Some((format!("{}: {}, {}, {column}", part.name, table.title, row.name), *time))
                }
                _ => None,
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::tests::sample;

    fn written(change: impl FnOnce(&mut serde_json::Value)) -> Result<Report> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.json");
        let mut json = serde_json::to_value(sample()).unwrap();
        change(&mut json);
        fs::write(&path, json.to_string()).unwrap();
        read(&path, true, &Machine::here())
    }

    #[test]
    fn another_machine_form_or_size_is_refused_with_its_name() {
        assert_eq!(written(|_| ()).unwrap(), sample());
        for (change, hint) in [
            (
                (|json| json["machine"]["processor"] = "Z80".into()) as fn(&mut serde_json::Value),
                "Z80 in the other report",
            ),
            (|json| json["format"] = 999.into(), "format 999"),
            (|json| json["quick"] = false.into(), "without --quick"),
            (|json| json["sections"] = "none".into(), "incomplete"),
            (|json| *json = "text".into(), "give a report.json"),
        ] {
            let error = format!("{:#}", written(change).unwrap_err());
            assert!(error.contains(hint), "{hint}: {error}");
        }
        let error =
            format!("{:#}", read(Path::new("/nowhere/report.json"), true, &Machine::here()).unwrap_err());
        assert!(error.contains("/nowhere/report.json"), "{error}");
    }

    #[test]
    fn only_what_is_slower_beyond_both_intervals_is_marked() {
        let with = |low: f64, high: f64| Median { median: (low + high) / 2.0, low, high, rounds: 9 };
        for (now, then, expected) in [
            (with(1.0, 1.1), with(1.0, 1.1), ""),
            (with(1.1, 1.3), with(1.0, 1.1), ""),
            (with(1.2, 1.3), with(1.0, 1.1), "SLOWER"),
            (with(0.8, 0.9), with(1.0, 1.1), "faster"),
        ] {
            assert_eq!(verdict(&now, &then), expected, "{now:?} {then:?}");
        }
        let (mut slow, then) = (sample(), sample());
        let Cell::Time(time) = &mut slow.sections[0].tables[0].rows[0].cells[0] else { panic!("no time") };
        *time = with(9.0, 10.0);
        let section = compare(&slow, &then);
        assert!(!section.bars[0].holds() && section.tables[0].rows.len() == 1);
        assert!(compare(&then, &then).bars[0].holds());
    }
}
