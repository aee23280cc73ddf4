//! Results of a training run as numbers, with a table and a plot.

pub(crate) mod chart;
mod plot;
mod table;

pub(crate) use table::bytes;

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::args::train::Train;
use crate::memory::Seen;

/// Results of a run; the content of `train.json`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// Options of the run.
    pub(crate) asked: Train,
    /// Network: layers, heads, width, context.
    pub(crate) model: crate::gpt::Config,
    /// Number of parameters of the network.
    pub(crate) params: usize,
    /// Elements after which a bucket was closed.
    pub(crate) bucket: usize,
    /// Origin of the text.
    pub(crate) corpus: String,
    /// Bytes of training text.
    pub(crate) train_bytes: usize,
    /// Bytes of held-out text.
    pub(crate) held_out_bytes: usize,
    /// Nats per byte if only the byte frequencies are known.
    pub(crate) byte_entropy: f64,
    /// Nats per byte if nothing is known: ln 256.
    pub(crate) uniform: f64,
    /// One entry for each stage of the run.
    pub(crate) stages: Vec<StageReport>,
    /// First difference between the stages' final parameters; `None` if they are bit-identical.
    pub(crate) difference: Option<String>,
}

/// Results of one stage.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StageReport {
    /// ZeRO stage: 0, 1 or 2.
    pub(crate) stage: u8,
    /// Loss of every step in nats per byte, averaged over the ranks.
    pub(crate) losses: Vec<f64>,
    /// Loss on held-out text after the last step.
    pub(crate) held_out: f64,
    /// Number of steps that were skipped because a gradient was not finite.
    pub(crate) skipped: usize,
    /// Wall time of a step in milliseconds.
    pub(crate) ms_per_step: f64,
    /// Maximum of the peak bytes over the ranks.
    pub(crate) peak: Peak,
    /// Bytes that each rank sent per step, counted for ring algorithms.
    pub(crate) wire_bytes: f64,
    /// Digest of the final parameters, names and bits.
    pub(crate) digest: String,
    /// Resident memory of the process, for all ranks together; with processes as ranks, the sum of theirs.
    pub(crate) process: Seen,
}

/// Peak bytes of a rank, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Peak {
    /// Parameters.
    pub(crate) params: u64,
    /// Gradients that stay until the update.
    pub(crate) grads: u64,
    /// Gradients in buckets that are being reduced.
    pub(crate) buckets: u64,
    /// Optimizer state.
    pub(crate) state: u64,
    /// candle's own copy of the parameters.
    pub(crate) framework: u64,
}

impl StageReport {
    /// Returns the mean loss of the last twentieth of the steps, at least of one step.
    pub(crate) fn train_loss(&self) -> f64 {
        let last = self.losses.len().div_ceil(20);
        self.losses[self.losses.len() - last..].iter().sum::<f64>() / last as f64
    }
}

impl Report {
    /// Returns 2 (n-1)/n times the bytes of the parameters with padding: the bytes that a ring moves to reduce gradients
    /// and to gather parameters.
    pub(crate) fn ring_bytes(&self) -> f64 {
        let ranks = self.asked.ranks() as f64;
        2.0 * (ranks - 1.0) / ranks * self.stages.first().map_or(0, |stage| stage.peak.params) as f64
    }

    /// Returns a line for each stage with the digest of its final parameters.
    pub(crate) fn digests(&self) -> String {
        let line = |stage: &StageReport| format!("parameters of stage {}: {}\n", stage.stage, stage.digest);
        self.stages.iter().map(line).collect()
    }

    /// Returns a sentence that all final parameters are equal.
    pub(crate) fn agreement(&self) -> String {
        let stages: Vec<String> = self.stages.iter().map(|stage| stage.stage.to_string()).collect();
        format!("parameters are bit-identical on every rank of stage {}", stages.join(", "))
    }

    /// Returns the table of all stages.
    pub(crate) fn table(&self) -> String {
        table::table(self)
    }

    /// Writes `train.json` and `loss.svg` into `folder`.
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        write_json(self, &folder.join("train.json"))?;
        plot::draw(self, &folder.join("loss.svg"))
    }
}

/// Writes a JSON file.
pub(crate) fn write_json(numbers: &impl Serialize, path: &Path) -> Result<()> {
    let text = serde_json::to_string_pretty(numbers)? + "\n";
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};
    use crate::gpt::Config;

    /// Returns an example of a report: a million parameters on four ranks.
    pub(super) fn report() -> Report {
        let Command::Train(asked) = Cli::parse_from(["meshstep-bench", "train"]).command else {
            panic!("not train")
        };
        Report {
            asked,
            model: Config::default(),
            params: 1_000_000,
            bucket: 62_500,
            corpus: "1.00 MiB of text".to_owned(),
            train_bytes: 983_040,
            held_out_bytes: 65_536,
            byte_entropy: 3.355,
            uniform: 256f64.ln(),
            stages: (0..3).map(stage).collect(),
            difference: None,
        }
    }

    fn stage(stage: u8) -> StageReport {
        let losses =
            (0..300).map(|t| 2.2 + 3.3 * (-f64::from(t) / 60.0).exp() + 0.1 * (f64::from(t) * 1.7).sin());
        let part = if stage == 0 { 4_000_000 } else { 1_000_000 };
        let grads = if stage == 2 { 1_000_000 } else { 4_000_000 };
        let peak = Peak {
            params: 4_000_000,
            grads,
            buckets: if stage == 2 { 600_000 } else { 0 },
            state: 2 * part,
            framework: 4_000_000,
        };
        StageReport {
            stage,
            losses: losses.collect(),
            held_out: 2.25,
            skipped: 0,
            ms_per_step: 50.0,
            peak,
            wire_bytes: 6_000_000.0,
            digest: format!("{:032x}", u32::from(stage)),
            process: Seen { before: Some(50_000_000), peak: None },
        }
    }

    #[test]
    fn the_train_loss_is_the_mean_of_the_last_twentieth() {
        let with = |losses: Vec<f64>| StageReport { losses, ..stage(0) }.train_loss();
        assert_eq!(with(vec![7.0]), 7.0);
        assert_eq!(with((0..40).map(f64::from).collect()), 38.5);
    }

    #[test]
    fn both_files_are_written_and_the_json_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        report().write(folder).unwrap();
        let json: serde_json::Value =
            serde_json::from_slice(&fs::read(folder.join("train.json")).unwrap()).unwrap();
        assert_eq!(json["stages"][2]["peak"]["state"], 2_000_000);
        assert_eq!(json["asked"]["optimizer"], "adamw");
        let svg = fs::read_to_string(folder.join("loss.svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(
            ["stages 0, 1, 2", "stage 2", "byte entropy", "nats per byte"]
                .iter()
                .all(|text| svg.contains(text))
        );
    }
}
