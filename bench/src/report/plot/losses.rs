//! Left panel: training losses, with reference levels.
//!
//! Stages with the same bits have the same curve, so later stages are drawn as thinner lines on top: a single line with
//! borders shows that they agree. The curve is a moving mean; the dots behind it are single steps.

use anyhow::Result;
use plotters::prelude::*;
use plotters::series::DashedLineSeries;

use super::{Area, Chart, FONT, GRID, INK, around, chart};
use crate::report::{Report, StageReport};

// Colours for colour-blind readers (Okabe and Ito 2008).
const STAGES: [RGBColor; 3] = [RGBColor(160, 210, 242), RGBColor(0, 114, 178), RGBColor(10, 10, 10)];
const WIDTHS: [u32; 3] = [9, 5, 1];
const ENTROPY: RGBColor = RGBColor(213, 94, 0);
const HELD_OUT: RGBColor = RGBColor(0, 130, 90);
const DOT: RGBColor = RGBColor(205, 205, 205);

pub(super) fn paint(report: &Report, area: &Area<'_>) -> Result<()> {
    let steps = report.stages.iter().map(|stage| stage.losses.len()).max().unwrap_or(0) as f64;
    let seen = report.stages.iter().flat_map(|stage| stage.losses.iter().copied().chain([stage.held_out]));
    let losses = around(seen.chain([report.byte_entropy, report.uniform]));
    let mut chart = chart(area, &title(report), 0.0..steps.max(2.0) * 1.02, losses)?;
    axes(&mut chart)?;
    level(&mut chart, report.uniform, INK, "ln 256: nothing is known")?;
    level(&mut chart, report.byte_entropy, ENTROPY, "byte entropy: frequencies are known")?;
    dots(&mut chart, report)?;
    for stage in &report.stages {
        curve(&mut chart, stage)?;
    }
    if let Some(stage) = report.stages.last() {
        held_out(&mut chart, stage)?;
    }
    legend(&mut chart)
}

fn title(report: &Report) -> String {
    let millions = report.params as f64 / 1e6;
    format!("Loss of a byte-level GPT, {millions:.2} million parameters, {} ranks", report.asked.ranks)
}

fn axes(chart: &mut Chart<'_, '_>) -> Result<()> {
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .label_style((FONT, 13).into_font().color(&INK))
        .axis_desc_style((FONT, 14).into_font().color(&INK))
        .x_desc("step")
        .y_desc("loss, nats per byte")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.1}"))
        .draw()?;
    Ok(())
}

/// Draws a dashed horizontal line with a name.
fn level(chart: &mut Chart<'_, '_>, y: f64, color: RGBColor, name: &str) -> Result<()> {
    let ends = chart.x_range();
    let line = [(ends.start, y), (ends.end, y)];
    let style = color.stroke_width(2);
    chart
        .draw_series(DashedLineSeries::new(line, 7, 5, style))?
        .label(name)
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], style));
    Ok(())
}

/// Draws the single steps of the first stage.
fn dots(chart: &mut Chart<'_, '_>, report: &Report) -> Result<()> {
    let losses = report.stages.first().map_or(&[][..], |stage| &stage.losses);
    let points = losses.iter().enumerate().map(|(t, &loss)| ((t + 1) as f64, loss));
    chart.draw_series(points.map(|point| Circle::new(point, 1, DOT.filled())))?;
    Ok(())
}

fn curve(chart: &mut Chart<'_, '_>, stage: &StageReport) -> Result<()> {
    let place = usize::from(stage.stage).min(STAGES.len() - 1);
    let style = STAGES[place].stroke_width(WIDTHS[place]);
    chart
        .draw_series(LineSeries::new(smooth(&stage.losses), style))?
        .label(format!("stage {}", stage.stage))
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], style));
    Ok(())
}

/// Draws the loss on held-out text, which was measured after the last step.
fn held_out(chart: &mut Chart<'_, '_>, stage: &StageReport) -> Result<()> {
    let point = (stage.losses.len() as f64, stage.held_out);
    chart
        .draw_series([Circle::new(point, 5, HELD_OUT.filled())])?
        .label(format!("held-out text: {:.3}", stage.held_out))
        .legend(|(x, y)| Circle::new((x + 11, y), 5, HELD_OUT.filled()));
    Ok(())
}

fn legend<'a, 'b: 'a>(chart: &mut Chart<'a, 'b>) -> Result<()> {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .margin(14)
        .legend_area_size(32)
        .background_style(RGBColor(246, 246, 246))
        .border_style(GRID)
        .label_font((FONT, 13).into_font().color(&INK))
        .draw()?;
    Ok(())
}

/// Returns each step's mean with its neighbours, over a fortieth of the run on either side. At the beginning, where the
/// loss falls steeply, the window shrinks symmetrically; at the end it is cut.
fn smooth(losses: &[f64]) -> Vec<(f64, f64)> {
    let mean = |t: usize| {
        let reach = (losses.len() / 40).min(t);
        let near = &losses[t - reach..=(t + reach).min(losses.len() - 1)];
        near.iter().sum::<f64>() / near.len() as f64
    };
    (0..losses.len()).map(|t| ((t + 1) as f64, mean(t))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smoothing_keeps_what_is_smooth_already() {
        let line: Vec<f64> = (0..100).map(f64::from).collect();
        let means = smooth(&line);
        assert_eq!(means.len(), 100);
        assert!(means.iter().zip(&line).take(98).all(|(&(_, mean), x)| (mean - x).abs() < 1e-12));
        assert!(smooth(&[3.0; 90]).iter().all(|&(_, mean)| mean == 3.0));
        assert_eq!(smooth(&[4.0]), [(1.0, 4.0)]);
        assert_eq!(smooth(&[]), []);
    }

    #[test]
    fn smoothing_evens_out_what_is_not() {
        let jagged: Vec<f64> = (0..400).map(|t| f64::from(t % 2)).collect();
        assert!(smooth(&jagged)[10..].iter().all(|&(_, mean)| (0.4..0.6).contains(&mean)));
    }
}
