//! Pictures: columns made of parts, and curves.

use anyhow::{Result, anyhow};
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use crate::measure::record::{Plot, Scale};

const SIZE: (u32, u32) = (1000, 420);
const INK: RGBColor = RGBColor(60, 60, 60);
const GRID: RGBColor = RGBColor(228, 228, 228);
const FONT: &str = "sans-serif";

// Told apart by the colour-blind, too (Okabe and Ito 2008).
const COLORS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(120, 120, 120),
    RGBColor(200, 185, 50),
];

/// A picture as text.
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

/// Beside each other, with room for the names of the parts behind the last.
fn stacked(
    root: &Root<'_>,
    title: &str,
    unit: &str,
    columns: &[String],
    parts: &[(String, Vec<f64>)],
) -> Result<()> {
    let height = |column: usize| parts.iter().map(|(_, values)| values[column]).sum::<f64>();
    let highest = (0..columns.len()).map(height).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(root)
        .caption(title, (FONT, 18).into_font().color(&INK))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(
            0.0..columns.len() as f64 + 1.0,
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
    for (i, (name, values)) in parts.iter().enumerate() {
        let fill = color(i).filled();
        let boxes = values.iter().zip(&mut base).enumerate().map(|(column, (value, base))| {
            let (from, x) = (*base, column as f64);
            *base += value;
            Rectangle::new([(x + 0.15, from), (x + 0.85, *base)], fill)
        });
        let drawn = chart.draw_series(boxes.collect::<Vec<_>>())?;
        drawn.label(name).legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], fill));
    }
    for (i, name) in columns.iter().enumerate() {
        let style = (FONT, 13).into_font().color(&INK);
        let (x, _) = chart.backend_coord(&(i as f64 + 0.15, 0.0));
        root.draw(&Text::new(name.clone(), (x, SIZE.1 as i32 - 40), style))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .label_font((FONT, 13).into_font().color(&INK))
        .draw()?;
    Ok(())
}

fn lines(
    root: &Root<'_>,
    title: &str,
    [x, y]: [&Scale; 2],
    curves: &[(String, Vec<(f64, f64)>)],
) -> Result<()> {
    let points = || curves.iter().flat_map(|(_, points)| points);
    let (xs, ys) = (span(points().map(|p| p.0), x.log), span(points().map(|p| p.1), y.log));
    match (x.log, y.log) {
        (true, true) => draw(root, title, [x, y], curves, xs.log_scale(), ys.log_scale()),
        (true, false) => draw(root, title, [x, y], curves, xs.log_scale(), ys),
        (false, true) => draw(root, title, [x, y], curves, xs, ys.log_scale()),
        (false, false) => draw(root, title, [x, y], curves, xs, ys),
    }
}

/// From a little below the smallest to a little above the largest; from 0 where the scale is linear.
fn span(values: impl Iterator<Item = f64>, log: bool) -> std::ops::Range<f64> {
    let range = values.filter(|value| value.is_finite() && (*value > 0.0 || !log));
    let range = range.fold(f64::MAX..f64::MIN, |range, value| range.start.min(value)..range.end.max(value));
    match log {
        _ if range.start > range.end => 0.5..1.0,
        true => range.start / 1.5..range.end * 1.5,
        false => 0.0..range.end * 1.1,
    }
}

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
    let mut chart = ChartBuilder::on(root)
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
        // Logarithmic axes have up to ten labels a decade for each of these.
        .x_labels(if x.log { 5 } else { 10 })
        .y_labels(if y.log { 5 } else { 8 })
        .x_label_formatter(&|value| tick(*value))
        .y_label_formatter(&|value| tick(*value))
        .draw()?;
    for (i, (name, points)) in curves.iter().enumerate() {
        let seen = || points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite());
        let line = chart.draw_series(LineSeries::new(seen(), color(i).stroke_width(2)))?;
        line.label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color(i).stroke_width(2)));
        chart.draw_series(seen().map(|point| Circle::new(point, 3, color(i).filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .label_font((FONT, 13).into_font().color(&INK))
        .draw()?;
    Ok(())
}

/// A number on an axis.
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
