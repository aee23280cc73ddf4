//! Tests of the page's text, without a browser; `cargo xtask ci --only reports` looks at it with one.

use super::*;
use crate::measure::record::{Bar, Cell, Scale, Shape, Table, Wanted};
use crate::measure::tests::sample;

/// Returns everything between the first `from` and the next `to` of the page.
fn between<'a>(page: &'a str, from: &str, to: &str) -> &'a str {
    let (_, rest) = page.split_once(from).unwrap_or_else(|| panic!("no {from}"));
    rest.split_once(to).unwrap_or_else(|| panic!("no {to} after {from}")).0
}

fn attributes<'a>(page: &'a str, name: &str) -> Vec<&'a str> {
    let start = format!(" {name}=\"");
    page.split(&start).skip(1).map(|rest| rest.split('"').next().unwrap()).collect()
}

#[test]
fn the_page_is_whole_and_refers_to_nothing() {
    let page = report(&sample(), "T");
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
    for tag in ["table", "figure", "svg", "ul", "h2", "section", "nav", "div", "text", "details"] {
        let count = |text: String| page.matches(&text).count();
        let opened = count(format!("<{tag} ")) + count(format!("<{tag}>"));
        assert_eq!(opened, count(format!("</{tag}>")), "{tag}");
        assert!(opened > 0 || tag == "details", "{tag}");
    }
    for link in ["src=", "href=\"h", "@import", "url(", "<script"] {
        assert!(!page.contains(link), "the page must not need other files: {link}");
    }
    assert!(page.contains("a &lt; b") && page.contains("&lt;b&gt;") && !page.contains("<b>\""));
}

#[test]
fn the_verdict_comes_first_and_the_contents_lead_to_sections() {
    let mut sample = sample();
    sample.sections.push(Section::new("stages & more", ""));
    let page = report(&sample, "T");
    let places =
        ["<h1>", "class=\"answer\">Verdict: good", "<nav", "<section"].map(|text| page.find(text).unwrap());
    assert!(places.is_sorted(), "{places:?}");
    let top = between(&page, "<h1>", "<nav");
    for text in ["97% of a copy's", "Machine: ", "9 rounds", "quick run", "python3 is not installed"] {
        assert!(top.contains(text), "{text}: {top}");
    }
    let ids = attributes(&page, "id");
    let links: Vec<&str> = attributes(between(&page, "<nav", "</nav>"), "href");
    assert_eq!(links, ["#s1", "#s2"]);
    assert!(links.iter().all(|link| ids.contains(&link.trim_start_matches('#'))), "{ids:?}");
    assert!(page.contains(">Stages &amp; more</a>"));
}

#[test]
fn backquotes_enclose_code() {
    assert_eq!(prose("see `a < b`, or c"), "see <code>a &lt; b</code>, or c");
}

#[test]
fn a_missed_limit_is_named_at_the_top() {
    let mut sample = sample();
    for i in 0..7 {
        sample.sections[0].bar(format!("figure {i}"), 2.0, Wanted::AtMost(1.0));
    }
    let page = report(&sample, "T");
    let top = between(&page, "class=\"answer\">", "<nav");
    assert!(top.starts_with("Verdict: not good. 7 of 8 limits are missed."), "{top}");
    assert!(top.contains("figure 4: 2, but the limit is at most 1") && !top.contains("figure 5"), "{top}");
    assert!(top.contains("and 2 more"));
    let table = between(&page, ">Limits: 7 of 8 missed</th>", "</table>");
    assert!(table.find("figure 6") < table.find("share of a copy"), "missed ones come first");
    let none = report(&crate::measure::record::Report { sections: vec![], ..sample }, "T");
    assert!(none.contains("Verdict: figures only"));
}

#[test]
fn every_chart_has_a_title_axes_with_units_ticks_marks_and_a_legend_outside() {
    let page = report(&sample(), "T");
    let figures: Vec<&str> =
        page.split("<figure>").skip(1).map(|rest| rest.split("</figure>").next().unwrap()).collect();
    assert_eq!(figures.len(), 2);
    for (figure, [title, unit]) in figures.into_iter().zip([["cost", "time, s"], ["memory", "memory, GB"]]) {
        assert!(figure.contains(&format!("<strong>{title}</strong>")), "{figure}");
        let chart = between(figure, "<svg viewBox", "</svg>");
        for axis in ["x", "y"] {
            let ticks = chart.matches(&format!("class=\"tick {axis}\"")).count();
            assert!(ticks >= 2, "{ticks} ticks {axis}: {chart}");
        }
        assert!(chart.contains(&format!(">{unit}</text>")), "{unit}: {chart}");
        assert!(chart.contains("class=\"curve") || chart.contains("class=\"part"), "{chart}");
        assert!(!chart.contains("legend") && figure.matches("<li>").count() == 2, "{figure}");
    }
}

#[test]
fn an_axis_that_does_not_begin_at_zero_says_so() {
    let curves = vec![("loss".to_owned(), vec![(0.0, 2.5), (1.0, 2.75)])];
    let shape = |y: Scale| Shape::Curves { x: Scale::amount("step"), y, curves: curves.clone() };
    let shown = |y| {
        let mut page = String::new();
        figure(&mut page, &Plot::new("loss", "Less is better.", shape(y)));
        page
    };
    let broken = "Less is better. The vertical axis begins at 2.50, not at 0.";
    assert!(shown(Scale::near("nats")).contains(broken), "{}", shown(Scale::near("nats")));
    assert!(!shown(Scale::amount("nats")).contains("begins at"));
    let mut page = String::new();
    let nothing = Shape::Curves { x: Scale::amount("step"), y: Scale::amount("nats"), curves: vec![] };
    figure(&mut page, &Plot::new("loss", "", nothing));
    assert!(page.contains("No value was measured.") && !page.contains("<svg"), "{page}");
}

#[test]
fn tables_scroll_within_themselves_and_long_ones_are_folded() {
    let mut table = Table::new("many", &["a"]);
    let mut add = |count: usize| {
        (0..count).for_each(|i| table.row(format!("{i}"), [Cell::Count(1)]));
        tables::table(&table)
    };
    let short = add(12);
    assert!(short.starts_with("<div class=\"scroll\"") && !short.contains("<details>"), "{short}");
    assert!(add(1).starts_with("<details><summary>many (13 rows)"));
    let missed = Bar { what: "w".into(), found: f64::NAN, wanted: Wanted::AtLeast(1.0) };
    let limits = tables::limits(&[missed]);
    assert!(limits.contains("✗ missed") && limits.contains("at least 1"), "{limits}");
}
