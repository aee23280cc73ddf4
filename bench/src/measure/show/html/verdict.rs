//! The verdict on top of a page: the number of limits that hold, the findings, and how far they can be trusted.

use std::fmt::Write as _;

use crate::measure::record::{Bar, Cell, Report, Section};
use crate::measure::show::{found, limit};
use crate::report::chart::escaped;

/// Number of missed limits that are named.
const NAMED: usize = 5;

pub(super) fn verdict(report: &Report) -> String {
    let bars = || report.sections.iter().flat_map(|section| &section.bars);
    let missed: Vec<&Bar> = bars().filter(|bar| !bar.holds()).collect();
    let (class, answer) = match (missed.len(), bars().count()) {
        (_, 0) => ("", "Verdict: figures only. No limit applies to this run.".to_owned()),
        (0, 1) => ("held", "Verdict: good. The one limit holds.".to_owned()),
        (0, all) => ("held", format!("Verdict: good. All {all} limits hold.")),
        (1, all) => ("missed", format!("Verdict: not good. 1 of {all} limits is missed.")),
        (missed, all) => ("missed", format!("Verdict: not good. {missed} of {all} limits are missed.")),
    };
    let mut text = format!("<div class=\"verdict {class}\">\n<p class=\"answer\">{answer}</p>\n");
    let mut lines = String::new();
    for bar in missed.iter().take(NAMED) {
        let line = format!("{}: {}, but the limit is {}", bar.what, found(bar), limit(bar));
        let _ = writeln!(lines, "<li class=\"missed\"><b>✗ missed:</b> {}</li>", escaped(&line));
    }
    if missed.len() > NAMED {
        let _ = writeln!(
            lines,
            "<li>and {} more, first in the sections' tables of limits</li>",
            missed.len() - NAMED
        );
    }
    for (i, section) in report.sections.iter().enumerate() {
        if let Some(sentence) = section.verdict.first() {
            let link = format!("<a href=\"#{}\">{}</a>", super::id(i), escaped(&super::name(section)));
            let _ = writeln!(lines, "<li>{link}: {}</li>", super::prose(sentence));
        }
    }
    for reason in &report.left_out {
        let _ = writeln!(lines, "<li class=\"missed\"><b>Left out:</b> {}</li>", escaped(reason));
    }
    let _ = writeln!(text, "<ul>\n{lines}</ul>\n<p>{}</p>", escaped(&trust(report)));
    let _ = writeln!(
        text,
        "<p class=\"note\">Machine: {}. Duration of all measurements: {:.0} s.</p>\n</div>",
        escaped(&report.machine.to_string()),
        report.seconds
    );
    text
}

/// Returns how sure the figures are.
fn trust(report: &Report) -> String {
    let rounds =
        report.sections.iter().flat_map(rounds).fold(None, |range: Option<(usize, usize)>, rounds| {
            let (least, most) = range.unwrap_or((rounds, rounds));
            Some((least.min(rounds), most.max(rounds)))
        });
    let sure = match rounds {
        None => {
            "How sure: counted figures are exact; each training ran once per seed, on the one machine below."
                .to_owned()
        }
        Some((least, most)) => {
            let many = if least == most { format!("{most}") } else { format!("{least} to {most}") };
            let interval = match (least < 6, most < 6) {
                (true, true) => {
                    "the interval is the range of all rounds, as fewer than 6 have no 95% interval"
                }
                (true, false) => "the interval covers 95%, or with fewer than 6 rounds the range of all",
                (false, _) => "the interval covers 95%",
            };
            format!("How sure: times are medians of {many} rounds on the one machine below; {interval}.")
        }
    };
    let quick = " This was a quick run with small sizes: it shows that everything works. Its times \
                 are not for comparison, and limits on times apply to full runs alone.";
    format!("{sure}{}", if report.quick { quick } else { "" })
}

/// Returns the numbers of rounds of a section's figures.
fn rounds(section: &Section) -> impl Iterator<Item = usize> {
    let cells = section.tables.iter().flat_map(|table| &table.rows).flat_map(|row| &row.cells);
    cells.filter_map(|cell| match cell {
        Cell::Time(median) | Cell::Ratio(median) | Cell::Overhead(median) => Some(median.rounds),
        _ => None,
    })
}
