//! `loss.svg` of a run: the loss on the left, the memory of each stage on the right, with their legends below them.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::chart::{LegendLine, Picture, Plot, STYLE, Scale, Shape, WIDTH, escaped};
use super::{Peak, Report, StageReport};

const MIB: f64 = (1 << 20) as f64;
/// Distance of the panels, and the margin around them.
const MARGIN: f64 = 20.0;
/// Height of a title, and of a legend's line.
const LINE: f64 = 24.0;

/// A part of a rank's memory: its name and its bytes.
type MemoryPart = (&'static str, fn(&Peak) -> u64);

/// The parts that sharding shrinks come last.
const PARTS: [MemoryPart; 5] = [
    ("candle's parameters", |peak| peak.framework),
    ("parameters", |peak| peak.params),
    ("gradients in buckets", |peak| peak.buckets),
    ("gradients", |peak| peak.grads),
    ("optimizer state", |peak| peak.state),
];

/// Draws `report` into the file `path`.
pub(super) fn draw(report: &Report, path: &Path) -> Result<()> {
    fs::write(path, picture(report)).with_context(|| format!("drawing {}", path.display()))
}

/// Returns both panels as one SVG.
fn picture(report: &Report) -> String {
    let panels: Vec<(Plot, Picture)> = [losses(report), memory(report)]
        .into_iter()
        .filter_map(|plot| plot.draw().map(|drawn| (plot, drawn)))
        .collect();
    let tall = |drawn: &Picture| 2.0 * LINE + drawn.height + LINE * drawn.legend.len() as f64;
    let height = panels.iter().map(|(_, drawn)| tall(drawn)).fold(LINE, f64::max) + MARGIN;
    let width = MARGIN + (WIDTH + MARGIN) * panels.len() as f64;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\">\n\
         <style>{STYLE}.title{{font-weight:600}}.paper{{fill:var(--paper)}}</style>\n\
         <rect class=\"paper\" width=\"{width}\" height=\"{height}\"/>\n"
    );
    for (i, (plot, drawn)) in panels.iter().enumerate() {
        let x = MARGIN + (WIDTH + MARGIN) * i as f64;
        let _ = writeln!(
            text,
            "<g transform=\"translate({x} {LINE})\"><text class=\"title\" x=\"4\">{}</text>\n\
             <g transform=\"translate(0 {LINE})\">{}</g>",
            escaped(&plot.title),
            drawn.marks
        );
        for (line, LegendLine { name, key }) in drawn.legend.iter().enumerate() {
            let y = LINE + drawn.height + LINE * line as f64;
            let _ = writeln!(
                text,
                "<g transform=\"translate(4 {y})\">{key}<text x=\"46\" y=\"14\">{}</text></g>",
                escaped(name)
            );
        }
        text.push_str("</g>\n");
    }
    text + "</svg>\n"
}

/// Returns the training losses, with reference levels. Stages with the same losses share a curve.
fn losses(report: &Report) -> Plot {
    let mut curves: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for (i, stage) in report.stages.iter().enumerate() {
        let same = |other: &StageReport| {
            other.losses.iter().map(|l| l.to_bits()).eq(stage.losses.iter().map(|l| l.to_bits()))
        };
        if report.stages[..i].iter().any(same) {
            continue;
        }
        let alike: Vec<String> = report.stages[i..]
            .iter()
            .filter(|other| same(other))
            .map(|other| other.stage.to_string())
            .collect();
        let name = match alike.as_slice() {
            [one] => format!("training, stage {one}"),
            all => format!("training, stages {}: the same bits", all.join(", ")),
        };
        curves.push((name, smooth(&stage.losses)));
    }
    let last = report.stages.iter().map(|stage| stage.losses.len()).max().unwrap_or(0) as f64;
    if let Some(stage) = report.stages.last() {
        curves.push(("held-out text, after the last step".to_owned(), vec![(last, stage.held_out)]));
    }
    let level = |name: &str, nats: f64| (name.to_owned(), vec![(0.0, nats), (last, nats)]);
    curves.push(level("byte entropy: only frequencies are known", report.byte_entropy));
    curves.push(level("ln 256: nothing is known", report.uniform));
    let millions = report.params as f64 / 1e6;
    let title =
        format!("Loss of a byte-level GPT, {millions:.2} million parameters, {} ranks", report.asked.ranks());
    let (x, y) = (Scale::amount("step"), Scale::near("loss, nats per byte (moving mean)"));
    Plot::new(title, "", Shape::Curves { x, y, curves })
}

fn memory(report: &Report) -> Plot {
    let part = |(name, bytes): &MemoryPart| {
        ((*name).to_owned(), report.stages.iter().map(|stage| bytes(&stage.peak) as f64 / MIB).collect())
    };
    let names = report.stages.iter().map(|stage| format!("stage {}", stage.stage)).collect();
    let parts = PARTS.iter().map(part).collect();
    Plot::new("Peak memory of one rank", "", Shape::Bars { label: "memory, MiB".to_owned(), names, parts })
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
    use super::super::tests::report;
    use super::*;

    #[test]
    fn stages_with_the_same_bits_share_a_curve_and_others_have_their_own() {
        let mut report = report();
        assert!(picture(&report).contains("stages 0, 1, 2: the same bits"));
        report.stages[1].losses[7] += 1e-9;
        let text = picture(&report);
        assert!(text.contains("stages 0, 2: the same bits") && text.contains("training, stage 1<"), "{text}");
    }

    #[test]
    fn a_bar_is_as_long_as_all_parts() {
        let mut report = report();
        let mib = 1 << 20;
        report.stages[0].peak =
            Peak { params: mib, grads: 2 * mib, buckets: 3 * mib, state: 4 * mib, framework: 5 * mib };
        assert!(picture(&report).contains(">15.0</text>"));
    }

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
