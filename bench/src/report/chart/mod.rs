//! Charts as SVG, for the pages of the reports and for `loss.svg`: data, drawing, and one style for light and dark screens.
//!
//! A chart's legend stands outside of its SVG, so it covers nothing and may wrap on a narrow screen. Each curve has its own dashes and
//! mark, and each part of a bar its own digit, so no meaning hangs on a colour alone.

mod axis;
mod bars;
mod curves;

use serde::{Deserialize, Serialize};

/// Width of a chart. A screen of 420 pixels shows it at 0.9 of this size, with texts that can be read.
pub(crate) const WIDTH: f64 = 440.0;
/// Colours and texts of charts, as CSS; the page sets the variables' values.
pub(crate) const STYLE: &str = include_str!("chart.css");
/// Number of colours in [`STYLE`].
const COLORS: usize = 8;

/// A chart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plot {
    pub(crate) title: String,
    /// Sentences below the chart: the direction that is better, and everything that a reader could take wrongly.
    pub(crate) caption: String,
    pub(crate) shape: Shape,
}

/// The marks of a chart; all axes are linear.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Shape {
    /// A bar for each name, of parts that add up. `label` is the axis of the amounts with its unit.
    Bars {
        label: String,
        names: Vec<String>,
        parts: Vec<(String, Vec<f64>)>,
    },
    Curves {
        x: Scale,
        y: Scale,
        curves: Vec<(String, Vec<(f64, f64)>)>,
    },
}

/// An axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Scale {
    /// Name of the axis, with its unit.
    pub(crate) label: String,
    /// True if the axis begins at 0.
    pub(crate) from_zero: bool,
    /// Names of the positions 0, 1, and so on, at equal distances; empty for an axis of numbers.
    pub(crate) names: Vec<String>,
}

impl Scale {
    /// An axis from 0, for amounts.
    pub(crate) fn amount(label: impl Into<String>) -> Self {
        Scale { label: label.into(), from_zero: true, names: Vec::new() }
    }

    /// An axis over the range of the values.
    pub(crate) fn near(label: impl Into<String>) -> Self {
        Scale { label: label.into(), from_zero: false, names: Vec::new() }
    }

    /// An axis of named positions.
    pub(crate) fn named(label: impl Into<String>, names: impl IntoIterator<Item = String>) -> Self {
        Scale { label: label.into(), from_zero: false, names: names.into_iter().collect() }
    }
}

/// A chart as SVG without its outer element, and the legend that belongs beside it.
#[derive(Debug)]
pub(crate) struct Picture {
    pub(crate) height: f64,
    pub(crate) marks: String,
    pub(crate) legend: Vec<LegendLine>,
}

/// A line of a legend.
#[derive(Debug)]
pub(crate) struct LegendLine {
    pub(crate) name: String,
    /// The marks of the series, in a box of [`LegendLine::BOX`].
    pub(crate) key: String,
}

impl LegendLine {
    /// Width and height of a key.
    pub(crate) const BOX: [f64; 2] = [36.0, 20.0];
}

impl Plot {
    pub(crate) fn new(title: impl Into<String>, caption: impl Into<String>, shape: Shape) -> Self {
        Plot { title: title.into(), caption: caption.into(), shape }
    }

    /// Draws the chart; `None` if it has no finite value.
    pub(crate) fn draw(&self) -> Option<Picture> {
        match &self.shape {
            Shape::Bars { label, names, parts } => bars::draw(label, names, parts),
            Shape::Curves { x, y, curves } => curves::draw([x, y], curves),
        }
    }

    /// Returns a sentence on an axis of amounts that does not begin at 0, as its heights must not be compared.
    pub(crate) fn broken_axis(&self) -> Option<String> {
        let Shape::Curves { y, curves, .. } = &self.shape else { return None };
        if y.from_zero || !y.names.is_empty() {
            return None;
        }
        let values = curves.iter().flat_map(|(_, points)| points.iter().map(|(_, y)| *y));
        let start = axis::LinearAxis::of(y, values, curves::TICKS)?.ticks.first()?.1.clone();
        (start != "0").then(|| format!("The vertical axis begins at {start}, not at 0."))
    }
}

/// Replaces the characters that HTML and SVG reserve.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
