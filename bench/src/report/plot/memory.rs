//! Right panel: peak memory of one rank, stage by stage.

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Area, Chart, FONT, GRID, INK, chart};
use crate::report::{Peak, Report};

const MIB: f64 = (1 << 20) as f64;
/// Half the width of a column; columns are 1 apart.
const HALF: f64 = 0.34;

/// A part of a rank's memory: its name, its colour, and its bytes.
type Part = (&'static str, RGBColor, fn(&Peak) -> u64);

/// From bottom to top, with the parts that sharding shrinks on top.
const PARTS: [Part; 5] = [
    ("candle's parameters", RGBColor(214, 214, 214), |peak| peak.framework),
    ("parameters", RGBColor(0, 114, 178), |peak| peak.params),
    ("gradients in buckets", RGBColor(150, 216, 194), |peak| peak.buckets),
    ("gradients", RGBColor(0, 158, 115), |peak| peak.grads),
    ("optimizer state", RGBColor(230, 159, 0), |peak| peak.state),
];

pub(super) fn paint(report: &Report, area: &Area<'_>) -> Result<()> {
    let highest = report.stages.iter().map(|stage| total(&stage.peak)).fold(0.0, f64::max).max(1e-3);
    // Leaves room above the columns for the legend.
    let mut chart = chart(area, "Peak memory of one rank", -0.5..columns(report) - 0.5, 0.0..highest * 1.5)?;
    axes(&mut chart, report)?;
    for (i, part) in PARTS.iter().enumerate() {
        boxes(&mut chart, report, i, part)?;
    }
    for (x, stage) in (0u32..).zip(&report.stages) {
        sum(&mut chart, f64::from(x), total(&stage.peak))?;
    }
    legend(&mut chart)
}

fn columns(report: &Report) -> f64 {
    report.stages.len().max(1) as f64
}

/// Returns the total memory of a rank in MiB.
fn total(peak: &Peak) -> f64 {
    PARTS.iter().map(|(_, _, bytes)| bytes(peak) as f64 / MIB).sum()
}

fn axes(chart: &mut Chart<'_, '_>, report: &Report) -> Result<()> {
    let name = |x: &f64| match report.stages.get(x.round() as usize) {
        Some(stage) if *x >= 0.0 && x.fract() == 0.0 => format!("stage {}", stage.stage),
        _ => String::new(),
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style((FONT, 13).into_font().color(&INK))
        .axis_desc_style((FONT, 14).into_font().color(&INK))
        .y_desc("MiB")
        .x_labels(report.stages.len() + 1)
        .x_label_formatter(&name)
        .y_label_formatter(&|y| format!("{y:.0}"))
        .draw()?;
    Ok(())
}

/// Draws the `i`-th part's box in every column.
fn boxes(chart: &mut Chart<'_, '_>, report: &Report, i: usize, &(name, color, bytes): &Part) -> Result<()> {
    let column = |(x, stage): (u32, &crate::report::StageReport)| {
        let below: u64 = PARTS[..i].iter().map(|(_, _, bytes)| bytes(&stage.peak)).sum();
        let (low, high) = (below as f64 / MIB, (below + bytes(&stage.peak)) as f64 / MIB);
        Rectangle::new([(f64::from(x) - HALF, low), (f64::from(x) + HALF, high)], color.filled())
    };
    chart
        .draw_series((0u32..).zip(&report.stages).map(column))?
        .label(name)
        .legend(move |(x, y)| Rectangle::new([(x + 4, y - 6), (x + 18, y + 6)], color.filled()));
    Ok(())
}

/// Prints a column's height above it.
fn sum(chart: &mut Chart<'_, '_>, x: f64, mib: f64) -> Result<()> {
    let style = (FONT, 13).into_font().color(&INK).pos(Pos::new(HPos::Center, VPos::Bottom));
    let text = EmptyElement::at((x, mib)) + Text::new(format!("{mib:.1}"), (0, -4), style);
    chart.draw_series([text])?;
    Ok(())
}

fn legend<'a, 'b: 'a>(chart: &mut Chart<'a, 'b>) -> Result<()> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .margin(10)
        .legend_area_size(26)
        .background_style(WHITE)
        .label_font((FONT, 13).into_font().color(&INK))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_as_high_as_all_its_parts() {
        let mib = 1 << 20;
        let peak = Peak { params: mib, grads: 2 * mib, buckets: 3 * mib, state: 4 * mib, framework: 5 * mib };
        assert_eq!(total(&peak), 15.0);
    }
}
