//! Verifies every checksum of a checkpoint, and reports what was checked.

use std::io::{ErrorKind, Write};
use std::time::Instant;

use anyhow::Result;
use meshstep_checkpoint::{Checked, CheckpointError};

use super::{Opened, Verdict, Which, open};
use crate::number::grouped;

pub(super) fn run(which: &Which, out: &mut dyn Write) -> Result<Verdict> {
    let Opened { saved, latest } = match open(which) {
        Ok(opened) => opened,
        Err(error) if is_damage(&error, which) => {
            writeln!(out, "damaged: {error}")?;
            return Ok(Verdict::Damaged);
        }
        Err(error) => return Err(error.into()),
    };
    let (started, mut found, mut told) = (Instant::now(), 0, Ok(()));
    let checked = saved.damage(|error| {
        found += 1;
        if told.is_ok() {
            told = writeln!(out, "damaged: {error}");
        }
    });
    told?;
    writeln!(out, "{}", summary(&checked, started.elapsed().as_secs_f64()))?;
    let whose = if latest { "LATEST has" } else { "the manifest itself has (LATEST names another step)" };
    writeln!(out, "the manifest of step {} has the hash that {whose}", saved.manifest().step)?;
    match found {
        0 => writeln!(out, "nothing is damaged")?,
        n => writeln!(out, "{n} damaged")?,
    }
    Ok(if found == 0 { Verdict::Whole } else { Verdict::Damaged })
}

/// Returns true if the error means damage, and false if it means that there is no checkpoint.
fn is_damage(error: &CheckpointError, which: &Which) -> bool {
    match error {
        CheckpointError::Nothing { .. } => false,
        // A step that LATEST names must exist.
        CheckpointError::Io { kind, .. } => *kind == ErrorKind::NotFound && which.step.is_none(),
        CheckpointError::Gone { .. } => which.step.is_none(),
        _ => true,
    }
}

fn summary(checked: &Checked, seconds: f64) -> String {
    let Checked { files, bytes: all, tensors, slots, windows, .. } = *checked;
    let rate = all as f64 / 1e6 / seconds.max(1e-9);
    format!(
        "checked {files} files, {} bytes, {tensors} tensors in {slots} vectors covered exactly, {windows} windows, \
         in {seconds:.1} s: {rate:.0} MB/s",
        grouped(all)
    )
}
