//! Curves: a line for each series, with marks at some of its points.

use std::fmt::Write as _;

use super::axis::LinearAxis;
use super::{COLORS, LegendLine, Picture, Scale, WIDTH, escaped};

const HEIGHT: f64 = 270.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 46.0;
const RIGHT: f64 = 22.0;
/// Width of a character, for the room that texts need.
const CHARACTER: f64 = 6.8;
/// Number of ticks of an axis, about.
pub(super) const TICKS: usize = 5;
/// Number of marks of a curve, at most about.
const MARKS: usize = 7;
/// Dashes and gaps of curves, in turn.
const DASHES: [&str; 4] = ["", "7 4", "2 3", "10 3 2 3"];

/// Draws the curves on their axes.
pub(super) fn draw([x, y]: [&Scale; 2], curves: &[(String, Vec<(f64, f64)>)]) -> Option<Picture> {
    let seen = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
        points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect()
    };
    let all: Vec<(f64, f64)> = curves.iter().flat_map(|(_, points)| seen(points)).collect();
    let [along, up] = [
        LinearAxis::of(x, all.iter().map(|p| p.0), TICKS)?,
        LinearAxis::of(y, all.iter().map(|p| p.1), TICKS)?,
    ];
    let widest = up.ticks.iter().map(|(_, text)| text.chars().count()).max().unwrap_or(0);
    let left = 12.0 + CHARACTER * widest as f64;
    let at = |(x, y): (f64, f64)| {
        let (width, height) = (WIDTH - left - RIGHT, HEIGHT - TOP - BOTTOM);
        (left + width * along.share(x), HEIGHT - BOTTOM - height * up.share(y))
    };
    let mut marks = axes([x, y], [&along, &up], left, at);
    for (i, (_, points)) in curves.iter().enumerate() {
        let points: Vec<(f64, f64)> = seen(points).into_iter().map(at).collect();
        marks += &line(i, &points);
        let every = points.len().div_ceil(MARKS).max(1);
        // Curves on top of each other have their marks at different points.
        let marked = points.iter().enumerate().filter(|(k, _)| k % every == i % every);
        marked.for_each(|(_, point)| marks += &mark(i, *point));
    }
    let legend = curves.iter().enumerate().map(|(i, (name, _))| {
        let [width, height] = LegendLine::BOX;
        let middle = height / 2.0;
        let key = line(i, &[(1.0, middle), (width - 1.0, middle)]) + &mark(i, (width / 2.0, middle));
        LegendLine { name: name.clone(), key }
    });
    Some(Picture { height: HEIGHT, marks, legend: legend.collect() })
}

fn axes(
    [x, y]: [&Scale; 2],
    [along, up]: [&LinearAxis; 2],
    left: f64,
    at: impl Fn((f64, f64)) -> (f64, f64),
) -> String {
    let (right, floor) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let mut text = String::new();
    for (value, label) in &up.ticks {
        let (_, y) = at((along.low, *value));
        let _ = write!(
            text,
            "<path class=\"grid\" d=\"M{left:.1} {y:.1}H{right:.1}\"/><text class=\"tick y\" x=\"{:.1}\" y=\"{:.1}\" \
             text-anchor=\"end\">{}</text>",
            left - 6.0,
            y + 4.0,
            escaped(label)
        );
    }
    let _ = write!(text, "<path class=\"base\" d=\"M{left:.1} {floor:.1}H{right:.1}\"/>");
    for (value, label) in &along.ticks {
        let (x, _) = at((*value, up.low));
        let _ = write!(
            text,
            "<path class=\"base\" d=\"M{x:.1} {floor:.1}v4\"/><text class=\"tick x\" x=\"{x:.1}\" y=\"{:.1}\" \
             text-anchor=\"middle\">{}</text>",
            floor + 18.0,
            escaped(label)
        );
    }
    let _ = writeln!(
        text,
        "<text class=\"axis-name y\" x=\"4\" y=\"13\">{}</text><text class=\"axis-name x\" x=\"{right:.1}\" y=\"{:.1}\" \
         text-anchor=\"end\">{}</text>",
        escaped(&y.label),
        HEIGHT - 7.0,
        escaped(&x.label)
    );
    text
}

/// Draws a line through points of the picture.
fn line(i: usize, points: &[(f64, f64)]) -> String {
    let mut path = String::new();
    for (k, (x, y)) in points.iter().enumerate() {
        let _ = write!(path, "{}{x:.1} {y:.1}", if k == 0 { 'M' } else { 'L' });
    }
    let dashes = DASHES[i % DASHES.len()];
    let dashes = if dashes.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dashes}\"") };
    format!("<path class=\"curve s{}\" d=\"{path}\"{dashes}/>", i % COLORS)
}

/// Draws the mark of a series: a disc, a square, a diamond, a triangle or a cross, in turn.
fn mark(i: usize, (x, y): (f64, f64)) -> String {
    let shape = match i % 5 {
        0 => "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
        1 => "m-3.2 -3.2h6.4v6.4h-6.4z",
        2 => "m0 -4.4l4.4 4.4l-4.4 4.4l-4.4 -4.4z",
        3 => "m0 -4l4 7.2h-8z",
        _ => "m-3.4 -3.4l6.8 6.8m0 -6.8l-6.8 6.8",
    };
    let color = i % COLORS;
    format!("<path class=\"mark s{color} f{color}\" d=\"M{x:.1} {y:.1}{shape}\"/>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_series_look_alike_without_colours() {
        let looks =
            |i: usize| (DASHES[i % DASHES.len()], mark(i, (0.0, 0.0)).split("d=").last().map(str::to_owned));
        let mut seen: Vec<_> = (0..20).map(looks).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 20);
    }

    #[test]
    fn a_value_that_is_no_number_is_left_out_and_the_rest_is_drawn() {
        let curves = [("a & b".to_owned(), vec![(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0)])];
        let drawn = draw([&Scale::amount("step"), &Scale::amount("loss, nats")], &curves).unwrap();
        assert!(!drawn.marks.contains("NaN") && drawn.marks.contains("loss, nats"), "{}", drawn.marks);
        assert_eq!((drawn.legend.len(), drawn.marks.matches("class=\"mark").count()), (1, 2));
        let nothing = [("a".to_owned(), vec![(f64::NAN, 1.0)])];
        assert!(draw([&Scale::amount(""), &Scale::amount("")], &nothing).is_none());
    }
}
