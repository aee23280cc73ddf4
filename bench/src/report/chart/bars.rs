//! Horizontal bars of parts that add up, with each bar's sum at its end.

use std::fmt::Write as _;

use super::axis::{LinearAxis, number};
use super::{COLORS, LegendLine, Picture, Scale, WIDTH, escaped};

/// Distance of two bars, and the height of one.
const ROW: f64 = 30.0;
const BAR: f64 = 20.0;
const TOP: f64 = 8.0;
const BOTTOM: f64 = 44.0;
/// Room for the sums.
const RIGHT: f64 = 50.0;
const CHARACTER: f64 = 6.8;
/// Least width of a part with its digit.
const DIGIT: f64 = 13.0;

/// Draws the bars from 0.
pub(super) fn draw(label: &str, names: &[String], parts: &[(String, Vec<f64>)]) -> Option<Picture> {
    let of = |part: &(String, Vec<f64>), row: usize| {
        part.1.get(row).copied().filter(|v| v.is_finite()).unwrap_or(0.0)
    };
    let sum = |row: usize| parts.iter().map(|part| of(part, row)).sum::<f64>();
    let sums: Vec<f64> = (0..names.len()).map(sum).collect();
    let axis = LinearAxis::of(&Scale::amount(label), sums.iter().copied(), 5)?;
    if sums.iter().all(|sum| *sum == 0.0) {
        return None;
    }
    let widest =
        names.iter().flat_map(|name| lines(name)).map(|line| line.chars().count()).max().unwrap_or(0);
    let left = (14.0 + CHARACTER * widest as f64).min(WIDTH / 2.0);
    let height = TOP + ROW * names.len() as f64 + BOTTOM;
    let at = |value: f64| left + (WIDTH - left - RIGHT) * axis.share(value);
    let mut marks = axes(label, &axis, (left, height), at);
    for (row, name) in names.iter().enumerate() {
        let y = TOP + ROW * row as f64 + (ROW - BAR) / 2.0;
        let text = y + BAR / 2.0 + 4.0;
        marks += &label_of(name, left - 8.0, text);
        let mut from = 0.0;
        for (i, one) in parts.iter().enumerate() {
            let to = from + of(one, row);
            let digit = (parts.len() > 1).then_some(i + 1);
            marks += &part(i, digit, [at(from), at(to)], y);
            from = to;
        }
        let _ = writeln!(marks, "<text x=\"{:.1}\" y=\"{text:.1}\">{}</text>", at(from) + 5.0, number(from));
    }
    let [_, tall] = LegendLine::BOX;
    let entry = |(i, (name, _)): (usize, &(String, Vec<f64>))| {
        let key = part(i, Some(i + 1), [8.0, 28.0], (tall - BAR) / 2.0);
        LegendLine { name: name.clone(), key }
    };
    // A single part needs no legend: the axis names it.
    let legend = if parts.len() > 1 { parts.iter().enumerate().map(entry).collect() } else { Vec::new() };
    Some(Picture { height, marks, legend })
}

fn axes(label: &str, axis: &LinearAxis, (left, height): (f64, f64), at: impl Fn(f64) -> f64) -> String {
    let floor = height - BOTTOM;
    let mut text = String::new();
    for (value, label) in &axis.ticks {
        let x = at(*value);
        let _ = write!(
            text,
            "<path class=\"grid\" d=\"M{x:.1} {TOP}V{floor:.1}\"/><text class=\"tick x\" x=\"{x:.1}\" y=\"{:.1}\" \
             text-anchor=\"middle\">{label}</text>",
            floor + 16.0
        );
    }
    let _ = writeln!(
        text,
        "<path class=\"base\" d=\"M{left:.1} {TOP}V{floor:.1}\"/><text class=\"axis-name x\" x=\"{:.1}\" y=\"{:.1}\" \
         text-anchor=\"end\">{}</text>",
        at(axis.high),
        height - 7.0,
        escaped(label)
    );
    text
}

/// Number of characters from which on a name has two lines.
const LONG: usize = 24;

/// Divides a long name at the space nearest to its middle.
fn lines(name: &str) -> Vec<&str> {
    let middle = name.len() / 2;
    let spaces = name.match_indices(' ').map(|(at, _)| at);
    match spaces.min_by_key(|at| at.abs_diff(middle)) {
        Some(at) if name.chars().count() > LONG => vec![&name[..at], &name[at + 1..]],
        _ => vec![name],
    }
}

/// Draws the name of a bar; `y` is the base of a single line.
fn label_of(name: &str, x: f64, y: f64) -> String {
    let lines = lines(name);
    let first = y - 6.5 * (lines.len() - 1) as f64;
    let spans = lines.iter().enumerate().map(|(i, line)| {
        format!("<tspan x=\"{x:.1}\" y=\"{:.1}\">{}</tspan>", first + 13.0 * i as f64, escaped(line))
    });
    format!("<text class=\"tick y\" text-anchor=\"end\">{}</text>", spans.collect::<String>())
}

/// Draws one part with its digit, if there is one and room for it.
fn part(i: usize, digit: Option<usize>, [from, to]: [f64; 2], y: f64) -> String {
    let mut text = String::new();
    if to - from < 0.05 {
        return text;
    }
    let _ = write!(
        text,
        "<rect class=\"part f{}\" x=\"{from:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{BAR}\"/>",
        i % COLORS,
        to - from
    );
    if let Some(digit) = digit.filter(|_| to - from >= DIGIT) {
        let (x, y) = ((from + to) / 2.0, y + BAR / 2.0 + 4.0);
        let _ = write!(
            text,
            "<text class=\"on\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{digit}</text>"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_as_its_parts_and_ends_with_their_sum() {
        let parts = [("a".to_owned(), vec![1.0, 2.0]), ("b <".to_owned(), vec![3.0, 0.0])];
        let drawn = draw("bytes, GB", &["x".into(), "y".into()], &parts).unwrap();
        // Three parts are not empty.
        assert_eq!(drawn.marks.matches("<rect").count(), 3);
        for text in [">4.00</text>", ">2.00</text>", "bytes, GB", ">x</tspan>"] {
            assert!(drawn.marks.contains(text), "{text}: {}", drawn.marks);
        }
        assert_eq!(drawn.legend.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>(), ["a", "b <"]);
        assert_eq!(lines("adamw, f32 master, bf16 grads"), ["adamw, f32", "master, bf16 grads"]);
        assert_eq!(lines("stage 1, whole"), ["stage 1, whole"]);
        assert!(draw("", &["x".into()], &[("a".into(), vec![0.0])]).is_none());
        assert!(draw("", &[], &[]).is_none());
    }
}
