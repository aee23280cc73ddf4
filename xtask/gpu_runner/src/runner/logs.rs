//! Logs of the programs: files in a scratch folder while programs run, and an archive of them in the results folder.

use super::report::replace;
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};

/// Folder for live logs; the run removes it at its end.
#[derive(Debug)]
pub(crate) struct Scratch {
    folder: PathBuf,
}

impl Scratch {
    pub(crate) fn new() -> anyhow::Result<Scratch> {
        let folder = std::env::temp_dir().join(format!("meshstep-gpu-runner-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| {
            format!(
                "cannot make {} for the logs; set TMPDIR to a folder that can be written",
                folder.display()
            )
        })?;
        Ok(Scratch { folder })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the log file for one output of a program.
    pub(crate) fn file(&self, program: &str, output: &str) -> PathBuf {
        let name: String =
            program.chars().map(|c| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '-' }).collect();
        self.folder.join(format!("{name}.{output}"))
    }

    /// Archives all logs as `logs.tar` in `out`.
    pub(crate) fn archive(&self, out: &Path) -> anyhow::Result<()> {
        replace(&out.join("logs.tar"), |part| {
            let mut archive = tar::Builder::new(fs::File::create(part)?);
            archive.append_dir_all("logs", &self.folder)?;
            archive.into_inner()?.sync_all()
        })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Returns the last lines of a log.
pub(crate) fn tail(path: &Path, lines: usize) -> String {
    let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
