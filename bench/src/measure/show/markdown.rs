//! The report in Markdown.

use std::fmt::Write as _;

use crate::measure::record::{Report, Section, Table};
use crate::measure::show::{bar, cell, terminal};

pub(crate) fn report(report: &Report) -> String {
    let Report { version, machine, quick, .. } = report;
    let quick = if *quick { " Small sizes and few rounds (`--quick`)." } else { "" };
    let mut text = format!("# Meshstep {version}, measured\n\n{machine}.{quick}\n");
    report.sections.iter().for_each(|part| section(&mut text, part));
    let _ = write!(text, "\n```text\n{}```\n", terminal::summary(report));
    text
}

fn section(text: &mut String, part: &Section) {
    let _ = write!(text, "\n## {}\n\n{}\n", part.name, part.about);
    part.verdict.iter().for_each(|sentence| _ = write!(text, "\n**{sentence}**\n"));
    part.tables.iter().for_each(|one| table(text, one));
    if !part.bars.is_empty() {
        text.push('\n');
    }
    for one in &part.bars {
        let verdict = if one.holds() { "holds" } else { "**missed**" };
        let _ = writeln!(text, "- {verdict}: {}: {}", one.what, bar(one));
    }
}

fn table(text: &mut String, table: &Table) {
    let head = std::iter::once(&table.title).chain(&table.columns).map(|field| escaped(field));
    let _ = writeln!(text, "\n| {} |", head.collect::<Vec<_>>().join(" | "));
    let _ = writeln!(text, "|---|{}", "---:|".repeat(table.columns.len()));
    for row in &table.rows {
        let fields = std::iter::once(row.name.clone()).chain(row.cells.iter().map(cell));
        let mut fields: Vec<String> = fields.map(|field| escaped(&field)).collect();
        fields.resize(table.columns.len() + 1, String::new());
        let _ = writeln!(text, "| {} |", fields.join(" | "));
    }
    for note in &table.notes {
        let _ = write!(text, "\n{note}\n");
    }
}

fn escaped(field: &str) -> String {
    field.replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::record::Cell;

    #[test]
    fn every_row_has_as_many_fields_as_the_head() {
        let mut one = Table::new("a|b", &["x", "y"]);
        one.row("r", [Cell::Count(7)]);
        let mut text = String::new();
        table(&mut text, &one);
        assert_eq!(text, "\n| a\\|b | x | y |\n|---|---:|---:|\n| r | 7 |  |\n");
    }
}
