//! `parity`: replays another system's training steps through Meshstep, and compares the results.
//!
//! A trace is a safetensors file of parameters, gradients and results; `spec.rs` defines its metadata, `key.rs` the names
//! of its tensors.

mod args;
mod compare;
mod fields;
mod key;
mod lbfgs;
mod observed;
mod problems;
mod reason;
mod replay;
mod report;
mod rule;
mod setting;
mod spec;
mod trace;

#[cfg(test)]
mod tests;

use std::io::{self, Write as _};
use std::path::Path;

use args::Device;
pub(crate) use args::Parity;
use compare::Difference;
pub(crate) use reason::Reason;
use report::{Line, Replayed, Report};
use setting::Asked;
use spec::Tolerance;
use trace::Trace;

/// Result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// Everything is within tolerance.
    Agrees,
    /// Some value is outside the tolerance.
    Differs,
    /// A file cannot be replayed.
    Unreplayable,
}

/// Replays every file, prints a line for each, and returns the worst verdict.
pub(crate) fn run(asked: &Parity) -> Result<Verdict, Reason> {
    if asked.device == Device::Cuda {
        return Err(Reason::NoCuda);
    }
    let mut report = Report::default();
    for path in &asked.files {
        let line = Line::new(path, file(path, asked.into(), (asked.rtol, asked.atol)));
        // A closed stdout must not change the verdict.
        let _ = writeln!(io::stdout(), "{line}");
        report.files.push(line);
    }
    if let Some(path) = &asked.json {
        report.write_json(path)?;
    }
    if let Some(path) = &asked.table {
        report.write_table(path)?;
    }
    Ok(report.verdict())
}

/// Replays one file.
fn file(path: &Path, asked: Asked, (rtol, atol): (Option<f64>, Option<f64>)) -> Result<Replayed, Reason> {
    let trace = Trace::parse(&std::fs::read(path)?)?;
    let Tolerance { rtol: r, atol: a } = trace.spec.tolerance;
    let tolerance = Tolerance { rtol: rtol.unwrap_or(r), atol: atol.unwrap_or(a) };
    let got = replay::replay(&trace, asked)?;
    let difference = Difference::new(&trace, &got, tolerance)?;
    Ok(Replayed::new(&trace, tolerance, difference))
}

impl From<&Parity> for Asked {
    fn from(asked: &Parity) -> Self {
        let &Parity { stage, ranks, partition, bucket, .. } = asked;
        Asked { stage, ranks, partition, bucket }
    }
}
