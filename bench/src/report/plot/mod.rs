//! Plot of a run: the loss on the left, the memory of each stage on the right.

mod losses;
mod memory;

use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, Result};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use super::Report;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

const SIZE: (u32, u32) = (1120, 480);
/// Width of the loss panel in pixels.
const LOSS_WIDTH: u32 = 700;

const INK: RGBColor = RGBColor(60, 60, 60);
const GRID: RGBColor = RGBColor(230, 230, 230);
const FONT: &str = "sans-serif";

/// Draws `report` into the file `path`.
pub(super) fn draw(report: &Report, path: &Path) -> Result<()> {
    paint(report, path).with_context(|| format!("drawing {}", path.display()))
}

fn paint(report: &Report, path: &Path) -> Result<()> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (left, right) = root.split_horizontally(LOSS_WIDTH);
    losses::paint(report, &left)?;
    memory::paint(report, &right)?;
    Ok(root.present()?)
}

/// Creates an empty chart with a title.
fn chart<'a, 'b>(area: &'a Area<'b>, title: &str, x: Range<f64>, y: Range<f64>) -> Result<Chart<'a, 'b>> {
    let chart = ChartBuilder::on(area)
        .caption(title, (FONT, 17).into_font().color(&INK))
        .margin(14)
        .margin_right(18)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(x, y)?;
    Ok(chart)
}

/// Returns the range of the finite `values` with a margin; 0 to 1 if there are none.
fn around(values: impl Iterator<Item = f64>) -> Range<f64> {
    let wider = |range: Range<f64>, x: f64| range.start.min(x)..range.end.max(x);
    let range = values.filter(|x| x.is_finite()).fold(f64::MAX..f64::MIN, wider);
    if range.start > range.end {
        return 0.0..1.0;
    }
    let margin = 0.05 * (range.end - range.start).max(0.1);
    range.start - margin..range.end + margin
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_hold_every_number_and_ignore_what_is_none() {
        let range = around([2.0, f64::NAN, 5.0, f64::INFINITY].into_iter());
        assert!(range.start < 2.0 && range.start > 1.5 && range.end > 5.0 && range.end < 5.5, "{range:?}");
        assert_eq!(around([f64::NAN].into_iter()), 0.0..1.0);
        let one = around([3.0].into_iter());
        assert!(one.start < 3.0 && 3.0 < one.end, "{one:?}");
    }
}
