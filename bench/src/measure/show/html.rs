//! The report as one HTML page without external resources: tables, and embedded SVG plots.

use std::fmt::Write as _;

use anyhow::Result;

use super::plot;
use crate::measure::record::{Report, Section, Table};
use crate::measure::show::{bar, cell};

const STYLE: &str = "body{font:15px/1.45 sans-serif;color:#222;max-width:1120px;margin:2em auto;padding:0 1em}\
table{border-collapse:collapse;margin:1em 0}caption{text-align:left;font-weight:600;padding:.3em 0}\
td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right;font-variant-numeric:tabular-nums}\
td:first-child,th:first-child{text-align:left}.missed{color:#b00020;font-weight:600}.note{color:#555}\
svg{max-width:100%;height:auto}";

pub(crate) fn report(report: &Report) -> Result<String> {
    let Report { version, machine, quick, seconds, left_out, .. } = report;
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Meshstep {version}, measured</title>\n\
         <style>{STYLE}</style></head><body>\n<h1>Meshstep {version}, measured</h1>\n<p>{}.{} {seconds:.0} s.</p>\n",
        escaped(&machine.to_string()),
        if *quick { " Small sizes and few rounds." } else { "" },
    );
    for reason in left_out {
        let _ = writeln!(page, "<p class=\"missed\">Left out: {}</p>", escaped(reason));
    }
    for part in &report.sections {
        section(&mut page, part)?;
    }
    page.push_str("</body></html>\n");
    Ok(page)
}

fn section(page: &mut String, part: &Section) -> Result<()> {
    let _ = writeln!(page, "<h2>{}</h2>\n<p>{}</p>", escaped(&part.name), escaped(&part.about));
    for picture in &part.plots {
        let _ = writeln!(page, "<figure>{}</figure>", plot::svg(picture)?);
    }
    part.tables.iter().for_each(|one| table(page, one));
    if !part.bars.is_empty() {
        page.push_str("<ul>\n");
        for one in &part.bars {
            let (class, verdict) = if one.holds() { ("held", "holds") } else { ("missed", "missed") };
            let line = format!("{}: {}", one.what, bar(one));
            let _ = writeln!(page, "<li class=\"{class}\">{verdict}: {}</li>", escaped(&line));
        }
        page.push_str("</ul>\n");
    }
    Ok(())
}

fn table(page: &mut String, table: &Table) {
    let _ = write!(page, "<table><caption>{}</caption><tr><th></th>", escaped(&table.title));
    table.columns.iter().for_each(|column| _ = write!(page, "<th>{}</th>", escaped(column)));
    page.push_str("</tr>\n");
    for row in &table.rows {
        let _ = write!(page, "<tr><td>{}</td>", escaped(&row.name));
        row.cells.iter().for_each(|one| _ = write!(page, "<td>{}</td>", escaped(&cell(one))));
        page.push_str("</tr>\n");
    }
    page.push_str("</table>\n");
    table.notes.iter().for_each(|note| _ = writeln!(page, "<p class=\"note\">{}</p>", escaped(note)));
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::tests::sample;

    #[test]
    fn the_page_is_whole_and_refers_to_nothing() {
        let page = report(&sample()).unwrap();
        assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
        for tag in ["table", "figure", "svg", "ul", "h2"] {
            let (open, close) = (format!("<{tag}"), format!("</{tag}>"));
            assert_eq!(page.matches(&open).count(), page.matches(&close).count(), "{tag}");
            assert!(page.contains(&open), "{tag}");
        }
        let links = ["src=", "href=", "@import", "url("];
        assert!(links.iter().all(|link| !page.contains(link)), "the page must not need other files");
        assert!(page.contains("a &lt; b"));
    }
}
