//! Tables of a section. Each scrolls within itself, and a long one is folded.

use crate::measure::record::{Bar, Row, Table};
use crate::measure::show::{cell, found, limit};
use crate::report::chart::escaped;

/// Number of rows up to which a table is open.
const SHORT: usize = 12;
/// Number of characters from which on a text wraps.
const WIDE: usize = 36;

/// Returns the table of limits: a row for each, the missed ones first.
pub(super) fn limits(bars: &[Bar]) -> String {
    if bars.is_empty() {
        return String::new();
    }
    let row = |bar: &&Bar| {
        let (class, word) = if bar.holds() { ("held", "✓ holds") } else { ("missed", "✗ missed") };
        let fields = [found(bar), limit(bar)].map(|field| data(&field)).concat();
        let what = escaped(&bar.what);
        format!("<tr><td class=\"wide\"><b class=\"{class}\">{word}:</b> {what}</td>{fields}</tr>\n")
    };
    let missed = bars.iter().filter(|bar| !bar.holds());
    let rows: Vec<String> =
        missed.chain(bars.iter().filter(|bar| bar.holds())).map(|bar| row(&bar)).collect();
    let title = match bars.iter().filter(|bar| !bar.holds()).count() {
        0 => "Limits: all hold".to_owned(),
        missed => format!("Limits: {missed} of {} missed", bars.len()),
    };
    framed(&title, &heads([title.as_str(), "measured", "limit"].into_iter()), &rows)
}

/// Returns a table with its notes.
pub(super) fn table(table: &Table) -> String {
    let row = |Row { name, cells }: &Row| {
        let cells: String = cells.iter().map(|one| data(&cell(one))).collect();
        format!("<tr>{}{cells}</tr>\n", data(name))
    };
    let rows: Vec<String> = table.rows.iter().map(row).collect();
    let columns = std::iter::once(table.title.as_str()).chain(table.columns.iter().map(String::as_str));
    let mut text = framed(&table.title, &heads(columns), &rows);
    text += &list("note", &table.notes);
    text
}

/// Returns a list of sentences; nothing without any.
pub(super) fn list(class: &str, sentences: &[String]) -> String {
    if sentences.is_empty() {
        return String::new();
    }
    let lines: String = sentences.iter().map(|one| format!("<li>{}</li>\n", super::prose(one))).collect();
    format!("<ul class=\"{class}\">\n{lines}</ul>\n")
}

fn framed(title: &str, heads: &str, rows: &[String]) -> String {
    let title = escaped(title);
    let table = format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{title}\"><table>\n\
         <tr>{heads}</tr>\n{}</table></div>\n",
        rows.concat()
    );
    match rows.len() {
        rows if rows > SHORT => {
            format!("<details><summary>{title} ({rows} rows)</summary>\n{table}</details>\n")
        }
        _ => table,
    }
}

fn heads<'a>(columns: impl Iterator<Item = &'a str>) -> String {
    columns.map(|column| format!("<th scope=\"col\">{}</th>", escaped(column))).collect()
}

fn data(text: &str) -> String {
    let class = if text.chars().count() > WIDE { " class=\"wide\"" } else { "" };
    format!("<td{class}>{}</td>", escaped(text))
}
