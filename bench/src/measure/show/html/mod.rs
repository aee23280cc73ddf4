//! The report as one HTML page without scripts and external resources: the verdict, a table of contents, and for each section its
//! findings, charts, limits and tables.

mod tables;
mod verdict;

use std::fmt::Write as _;

use crate::measure::record::{Plot, Report, Section};
use crate::report::chart::{LegendLine, Picture, STYLE, WIDTH, escaped};

const PAGE: &str = include_str!("page.css");

/// Formats a report under a title that says the subject.
pub(crate) fn report(report: &Report, title: &str) -> String {
    let heading = format!("{} {}", escaped(title), escaped(&report.version));
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>{heading}</title>\n\
         <style>\n{STYLE}{PAGE}</style></head>\n<body>\n<h1>{heading}</h1>\n"
    );
    page += &verdict::verdict(report);
    page += &contents(&report.sections);
    report.sections.iter().enumerate().for_each(|(i, part)| section(&mut page, i, part));
    page + "</body></html>\n"
}

/// Returns the id of a section.
fn id(i: usize) -> String {
    format!("s{}", i + 1)
}

/// Returns the name of a section with a capital letter.
fn name(section: &Section) -> String {
    let mut letters = section.name.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// Formats sentences in which backquotes enclose code.
fn prose(text: &str) -> String {
    let part = |(i, part): (usize, &str)| match i % 2 {
        0 => escaped(part),
        _ => format!("<code>{}</code>", escaped(part)),
    };
    text.split('`').enumerate().map(part).collect()
}

fn contents(sections: &[Section]) -> String {
    let line = |(i, section): (usize, &Section)| {
        format!("<li><a href=\"#{}\">{}</a></li>\n", id(i), escaped(&name(section)))
    };
    let lines: String = sections.iter().enumerate().map(line).collect();
    format!("<nav aria-label=\"Contents\"><strong>Contents</strong>\n<ol>\n{lines}</ol></nav>\n")
}

fn section(page: &mut String, i: usize, part: &Section) {
    let _ = writeln!(page, "<section id=\"{}\">\n<h2>{}</h2>", id(i), escaped(&name(part)));
    page.push_str(&tables::list("finding", &part.verdict));
    part.plots.iter().for_each(|plot| figure(page, plot));
    page.push_str(&tables::limits(&part.bars));
    if !part.about.is_empty() {
        let _ = writeln!(
            page,
            "<p class=\"how\"><strong>About these figures.</strong> {}</p>",
            prose(&part.about)
        );
    }
    part.tables.iter().for_each(|one| page.push_str(&tables::table(one)));
    page.push_str("</section>\n");
}

/// Adds a chart with its legend beside it, or below it on a narrow screen.
fn figure(page: &mut String, plot: &Plot) {
    let title = escaped(&plot.title);
    let captions = [Some(plot.caption.clone()), plot.broken_axis()];
    let captions: Vec<String> = captions.into_iter().flatten().filter(|text| !text.is_empty()).collect();
    let _ = writeln!(
        page,
        "<figure><figcaption><strong>{title}</strong><span class=\"about\">{}</span></figcaption>",
        prose(&captions.join(" "))
    );
    match plot.draw() {
        None => page.push_str("<p>No value was measured.</p>\n"),
        Some(Picture { height, marks, legend }) => {
            let _ = writeln!(
                page,
                "<div class=\"chart\"><svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\">\n{marks}</svg>"
            );
            let [width, height] = LegendLine::BOX;
            let line = |LegendLine { name, key }: &LegendLine| {
                let key = format!("<svg viewBox=\"0 0 {width} {height}\" aria-hidden=\"true\">{key}</svg>");
                format!("<li>{key}<span>{}</span></li>\n", escaped(name))
            };
            if !legend.is_empty() {
                let lines: String = legend.iter().map(line).collect();
                let _ = writeln!(page, "<ul class=\"legend\">\n{lines}</ul>");
            }
            page.push_str("</div>\n");
        }
    }
    page.push_str("</figure>\n");
}

#[cfg(test)]
mod tests;
