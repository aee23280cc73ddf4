//! Plots: stacked columns, and curves.

use anyhow::{Result, anyhow};
use plotters::coord::ranged1d::{AsRangedCoord, KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::*;
use std::ops::Range;

use crate::measure::record::{Plot, Scale};

const SIZE: (u32, u32) = (1240, 420);
/// Width of the legend, taken from the plot's width.
const LEGEND: u32 = 300;
const INK: RGBColor = RGBColor(60, 60, 60);
const GRID: RGBColor = RGBColor(228, 228, 228);
const FONT: &str = "sans-serif";

// Colours for colour-blind readers (Okabe and Ito 2008), then darker ones, so that each method of a comparison has its own.
const COLORS: [RGBColor; 12] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(120, 120, 120),
    RGBColor(200, 185, 50),
    RGBColor(20, 20, 20),
    RGBColor(110, 60, 150),
    RGBColor(120, 70, 30),
    RGBColor(150, 215, 180),
];

/// Draws a plot as SVG text.
pub(super) fn svg(plot: &Plot) -> Result<String> {
    let mut text = String::new();
    let root = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
    let drawn = root.fill(&WHITE).map_err(|error| anyhow!("{error}")).and_then(|()| match plot {
        Plot::Columns { title, unit, columns, parts } => stacked(&root, title, unit, columns, parts),
        Plot::Curves { title, x, y, curves } => lines(&root, title, [x, y], curves),
    });
    root.present()?;
    drop(root);
    drawn.map(|()| text)
}

type Root<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn color(i: usize) -> RGBColor {
    COLORS[i % COLORS.len()]
}

/// Draws stacked columns, with a legend of the parts on the right.
fn stacked(
    root: &Root<'_>,
    title: &str,
    unit: &str,
    columns: &[String],
    parts: &[(String, Vec<f64>)],
) -> Result<()> {
    let height = |column: usize| parts.iter().map(|(_, values)| values[column]).sum::<f64>();
    let highest = (0..columns.len()).map(height).fold(0.0, f64::max);
    let (left, right) = root.split_horizontally(SIZE.0 - LEGEND);
    let mut chart = ChartBuilder::on(&left)
        .caption(title, (FONT, 18).into_font().color(&INK))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(
            0.0..columns.len().max(1) as f64,
            0.0..if highest > 0.0 { highest * 1.05 } else { 1.0 },
        )?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(INK)
        .x_labels(0)
        .label_style((FONT, 13).into_font().color(&INK))
        .y_desc(unit)
        .draw()?;
    let mut base = vec![0.0; columns.len()];
    for (i, (_, values)) in parts.iter().enumerate() {
        let fill = color(i).filled();
        let boxes = values.iter().zip(&mut base).enumerate().map(|(column, (value, base))| {
            let (from, x) = (*base, column as f64);
            *base += value;
            Rectangle::new([(x + 0.15, from), (x + 0.85, *base)], fill)
        });
        chart.draw_series(boxes.collect::<Vec<_>>())?;
    }
    for (i, name) in columns.iter().enumerate() {
        let style = (FONT, 13).into_font().color(&INK);
        let (x, _) = chart.backend_coord(&(i as f64 + 0.15, 0.0));
        left.draw(&Text::new(name.clone(), (x, SIZE.1 as i32 - 40), style))?;
    }
    legend(&right, parts.iter().map(|(name, _)| name.as_str()))
}

/// Draws names next to their colours, from top to bottom.
fn legend<'n>(area: &Root<'_>, names: impl Iterator<Item = &'n str>) -> Result<()> {
    for (i, name) in names.enumerate() {
        let y = 48 + 20 * i as i32;
        area.draw(&Rectangle::new([(4, y), (18, y + 10)], color(i).filled()))?;
        area.draw(&Text::new(name.to_owned(), (26, y - 2), (FONT, 13).into_font().color(&INK)))?;
    }
    Ok(())
}

fn lines(
    root: &Root<'_>,
    title: &str,
    [x, y]: [&Scale; 2],
    curves: &[(String, Vec<(f64, f64)>)],
) -> Result<()> {
    let points = || curves.iter().flat_map(|(_, points)| points);
    let (xs, ys) = (span(points().map(|p| p.0), x), span(points().map(|p| p.1), y));
    match (x.log, y.log) {
        (true, true) => draw(root, title, [x, y], curves, Log(xs), Log(ys)),
        (true, false) => draw(root, title, [x, y], curves, Log(xs), ys),
        (false, true) => draw(root, title, [x, y], curves, xs, Log(ys)),
        (false, false) => draw(root, title, [x, y], curves, xs, ys),
    }
}

/// Returns a range from a little below the smallest value to a little above the largest, or from 0.
fn span(values: impl Iterator<Item = f64>, scale: &Scale) -> Range<f64> {
    let range = values.filter(|value| value.is_finite() && (*value > 0.0 || !scale.log));
    let range = range.fold(f64::MAX..f64::MIN, |range, value| range.start.min(value)..range.end.max(value));
    let around = (0.05 * (range.end - range.start)).max(1e-3 * range.end.abs());
    match (scale.log, scale.from_zero) {
        _ if range.start > range.end => 0.5..1.0,
        (true, _) => range.start / 1.5..range.end * 1.5,
        (false, true) => 0.0..range.end * 1.1,
        (false, false) => range.start - around..range.end + around,
    }
}

/// A logarithmic axis with labels at 1, 2 and 5 of each decade, or only at whole decades if these are too many.
struct Log(Range<f64>);

impl Ranged for Log {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (low, high): (i32, i32)) -> i32 {
        let (start, end) = (libm::log(self.0.start), libm::log(self.0.end));
        let share = (libm::log(*value) - start) / (end - start);
        low + (share * f64::from(high - low)) as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        let decades = libm::log10(self.0.start).floor() as i32..=libm::log10(self.0.end).ceil() as i32;
        let at = |steps: &[f64]| -> Vec<f64> {
            let all = decades
                .clone()
                .flat_map(|decade| steps.iter().map(move |step| step * libm::pow(10.0, f64::from(decade))));
            all.filter(|value| self.0.contains(value)).collect()
        };
        let (fine, coarse) = (at(&[1.0, 2.0, 5.0]), at(&[1.0]));
        if fine.len() <= hint.max_num_points() { fine } else { coarse }
    }

    fn range(&self) -> Range<f64> {
        self.0.clone()
    }
}

impl ValueFormatter<f64> for Log {}

fn draw<X, Y>(
    root: &Root<'_>,
    title: &str,
    [x, y]: [&Scale; 2],
    curves: &[(String, Vec<(f64, f64)>)],
    xs: X,
    ys: Y,
) -> Result<()>
where
    X: AsRangedCoord<Value = f64>,
    Y: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
    Y::CoordDescType: ValueFormatter<f64>,
{
    let (left, right) = root.split_horizontally(SIZE.0 - LEGEND);
    let mut chart = ChartBuilder::on(&left)
        .caption(title, (FONT, 18).into_font().color(&INK))
        .margin(12)
        .x_label_area_size(46)
        .y_label_area_size(70)
        .build_cartesian_2d(xs, ys)?;
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(INK)
        .label_style((FONT, 13).into_font().color(&INK))
        .x_desc(&x.label)
        .y_desc(&y.label)
        .x_labels(12)
        .y_labels(12)
        .x_label_formatter(&|value| tick(*value))
        .y_label_formatter(&|value| tick(*value))
        .draw()?;
    for (i, (_, points)) in curves.iter().enumerate() {
        let seen = || points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite());
        chart.draw_series(LineSeries::new(seen(), color(i).stroke_width(2)))?;
        chart.draw_series(seen().map(|point| Circle::new(point, 3, color(i).filled())))?;
    }
    legend(&right, curves.iter().map(|(name, _)| name.as_str()))
}

/// Formats a number on an axis.
fn tick(value: f64) -> String {
    match value.abs() {
        v if v >= 1e4 || (v > 0.0 && v < 1e-2) => format!("{value:.0e}"),
        v if v >= 10.0 || v == v.trunc() => format!("{value:.0}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_name_what_they_show() {
        let columns = Plot::Columns {
            title: "memory".into(),
            unit: "GB".into(),
            columns: vec!["stage 0".into(), "stage 1".into()],
            parts: vec![("params".into(), vec![4.0, 4.0]), ("state".into(), vec![8.0, 2.0])],
        };
        let curve = |x, y| Plot::Curves {
            title: "cost".into(),
            x,
            y,
            curves: vec![("ours".into(), vec![(1e5, 0.1), (1e6, f64::NAN), (1e7, 1.0)])],
        };
        for (plot, words) in [
            (columns, &["memory", "GB", "stage 1", "state"][..]),
            (curve(Scale::log("parameters"), Scale::log("s")), &["cost", "parameters", "ours"]),
            (curve(Scale::linear("ranks"), Scale::log("s")), &["ranks"]),
            (curve(Scale::log("ranks"), Scale::linear("share")), &["share"]),
            (curve(Scale::linear("ranks"), Scale::linear("share")), &["share"]),
        ] {
            let text = svg(&plot).unwrap();
            assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"));
            assert!(words.iter().all(|word| text.contains(word)), "{words:?}");
            assert!(!text.contains("NaN"));
        }
    }

    #[test]
    fn empty_pictures_are_pictures() {
        let plot = Plot::Curves { title: "t".into(), x: Scale::log("x"), y: Scale::log("y"), curves: vec![] };
        assert!(svg(&plot).is_ok());
        let plot = Plot::Columns { title: "t".into(), unit: "u".into(), columns: vec![], parts: vec![] };
        assert!(svg(&plot).is_ok());
    }
}
