//! Another system's training steps replayed through Meshstep, and how far apart the two end.
//!
//! A trace is a safetensors file of parameters, gradients and what came out; `spec.rs` is what it says about itself, `key.rs`
//! what its tensors are called.

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

use crate::cli::{Device, Parity};
use compare::Difference;
pub(crate) use reason::Reason;
use report::{Line, Replayed, Report};
use setting::Asked;
use spec::Tolerance;
use trace::Trace;

/// How a comparison ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// Everything is within tolerance.
    Agrees,
    /// Something is not.
    Differs,
    /// A file could not be replayed.
    Unreplayable,
}

/// Replays every file, prints a line for each, and returns the worst that happened.
pub(crate) fn run(asked: &Parity) -> Result<Verdict, Reason> {
    if asked.device == Device::Cuda {
        return Err(Reason::NoCuda);
    }
    let mut report = Report::default();
    for path in &asked.files {
        let line = Line::new(path, file(path, asked.into(), (asked.rtol, asked.atol)));
        // What the answer is does not depend on whether anybody reads it.
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

/// One file's replay.
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
