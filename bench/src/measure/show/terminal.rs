//! The report as tables of aligned text.

use crate::measure::record::{Report, Section, Table};
use crate::measure::show::{bar, cell};

/// Formats a section, which is printed when its suite has ended.
pub(crate) fn section(section: &Section) -> String {
    let mut text = format!("\n== {} ==\n{}\n", section.name, section.about);
    for table in &section.tables {
        text += &format!("\n{}", self::table(table));
    }
    if !section.verdict.is_empty() {
        text += &format!("\n{}\n", section.verdict.join("\n"));
    }
    if !section.bars.is_empty() {
        text.push('\n');
    }
    for one in &section.bars {
        text += &format!("{:7} {}: {}\n", verdict(one.holds()), one.what, bar(one));
    }
    text
}

/// Returns the last lines: missing parts, and the number of bars that hold.
pub(crate) fn summary(report: &Report) -> String {
    let bars = || report.sections.iter().flat_map(|section| &section.bars);
    let held = bars().filter(|bar| bar.holds()).count();
    let mut text = String::new();
    for left_out in &report.left_out {
        text += &format!("left out: {left_out}\n");
    }
    text + &format!("{held} of {} bars hold; {:.0} s\n", bars().count(), report.seconds)
}

fn verdict(holds: bool) -> &'static str {
    if holds { "holds" } else { "MISSED" }
}

fn table(table: &Table) -> String {
    let head = std::iter::once(table.title.clone()).chain(table.columns.iter().cloned()).collect();
    let row = |row: &crate::measure::record::Row| -> Vec<String> {
        std::iter::once(row.name.clone()).chain(row.cells.iter().map(cell)).collect()
    };
    let lines: Vec<Vec<String>> = std::iter::once(head).chain(table.rows.iter().map(row)).collect();
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(|text| text.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text: String = lines.iter().map(|line| aligned(line, &widths)).collect();
    for note in &table.notes {
        text += &format!("  {note}\n");
    }
    text
}

/// Aligns the name to the left and the figures to the right.
fn aligned(line: &[String], widths: &[usize]) -> String {
    let mut text = String::new();
    for (i, (field, width)) in line.iter().zip(widths).enumerate() {
        let width = *width;
        text += &if i == 0 { format!("{field:<width$}") } else { format!("  {field:>width$}") };
    }
    format!("{}\n", text.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::record::{Cell, Wanted};

    #[test]
    fn columns_are_as_wide_as_their_widest_figure() {
        let mut table = Table::new("rule", &["time", "bytes"]);
        table.row("adamw", [Cell::Text("a".into()), Cell::Bytes(1500)]);
        table.row("sgd", [Cell::None]);
        table.note("a note");
        assert_eq!(super::table(&table), "rule   time    bytes\nadamw     a  1.50 kB\nsgd\n  a note\n");
        let mut part = Section::new("kernels", "about");
        part.tables.push(table);
        part.verdict.push("Half as fast.".into());
        part.bar("share", 0.5, Wanted::AtLeast(0.9));
        let text = section(&part);
        assert!(
            text.contains("== kernels ==")
                && text.ends_with("\nHalf as fast.\n\nMISSED  share: 0.500, at least 0.900\n"),
            "{text}"
        );
    }
}
