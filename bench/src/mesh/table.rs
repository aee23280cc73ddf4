//! Table of runs on meshes, with a row for each: losses, norms, time and bytes.

use super::Trained;
use crate::report::bytes;

const HEADS: [&str; 9] = [
    "stage",
    "first loss",
    "last loss",
    "last norm",
    "ms a step",
    "optimizer B",
    "tp layers B",
    "cp layers B",
    "peak B",
];

/// Returns a line for each run with the digest of its final parameters.
pub(crate) fn digests(runs: &[Trained]) -> String {
    let line = |run: &Trained| format!("parameters of {} stage {}: {}\n", run.mesh, run.stage, run.digest);
    runs.iter().map(line).collect()
}

/// Formats all runs. Bytes are those that one rank sends per step, and the peak of its optimizer.
pub(crate) fn table(runs: &[Trained]) -> String {
    let line = |mesh: &str, cells: &[String]| {
        let cells: String = cells.iter().map(|cell| format!("{cell:>13}")).collect();
        format!("{mesh:<16}{cells}\n")
    };
    let heads = HEADS.map(str::to_owned);
    let rows = runs.iter().map(|run| line(&run.mesh.to_string(), &cells(run)));
    std::iter::once(line("mesh", &heads)).chain(rows).collect()
}

fn cells(run: &Trained) -> [String; 9] {
    let ends =
        |values: &[f64]| [values.first(), values.last()].map(|value| value.copied().unwrap_or(f64::NAN));
    let ([first, last], [_, norm]) = (ends(&run.losses), ends(&run.norms));
    [
        run.stage.to_string(),
        format!("{first:.5}"),
        format!("{last:.5}"),
        format!("{norm:.5}"),
        format!("{:.1}", run.ms_per_step),
        bytes(run.sent),
        bytes(run.sent_by_layers[0]),
        bytes(run.sent_by_layers[1]),
        bytes(run.peak),
    ]
}
