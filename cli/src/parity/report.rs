//! Reports of replays: one line for each file, JSON, and a Markdown table.

use std::fmt::{self, Write as _};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::Verdict;
use super::compare::{Difference, Largest};
use super::reason::Reason;
use super::spec::Tolerance;
use super::trace::Trace;

/// Results of all files of one invocation.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    pub(super) files: Vec<Line>,
}

/// Result of one file.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    file: String,
    #[serde(flatten)]
    outcome: Outcome,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Replayed(Box<Replayed>),
    CannotBeReplayed(String),
}

/// A completed replay.
#[derive(Debug, Serialize)]
pub(super) struct Replayed {
    pub(super) rule: String,
    pub(super) source: String,
    pub(super) steps: u64,
    pub(super) dtypes: String,
    pub(super) tolerance: Tolerance,
    pub(super) difference: Difference,
}

impl Replayed {
    pub(super) fn new(trace: &Trace, tolerance: Tolerance, difference: Difference) -> Self {
        let mut dtypes: Vec<String> = trace.params().map(|(_, param)| param.dtype.to_string()).collect();
        dtypes.sort();
        dtypes.dedup();
        let name = trace.spec.optimizer.get("name").and_then(|name| name.as_str());
        Replayed {
            rule: name.unwrap_or_default().to_owned(),
            source: trace.spec.source.clone(),
            steps: trace.spec.steps,
            dtypes: dtypes.join(" "),
            tolerance,
            difference,
        }
    }
}

impl Line {
    pub(super) fn new(path: &Path, outcome: Result<Replayed, Reason>) -> Self {
        let outcome = match outcome {
            Ok(replayed) => Outcome::Replayed(Box::new(replayed)),
            Err(reason) => Outcome::CannotBeReplayed(reason.to_string()),
        };
        Line { file: path.display().to_string(), outcome }
    }

    fn verdict(&self) -> Verdict {
        match &self.outcome {
            Outcome::Replayed(replayed) if replayed.difference.outside == 0 => Verdict::Agrees,
            Outcome::Replayed(_) => Verdict::Differs,
            Outcome::CannotBeReplayed(_) => Verdict::Unreplayable,
        }
    }

    /// Appends the file's row to the table: the file, then the figures.
    fn row(&self, table: &mut String) {
        let name =
            Path::new(&self.file).file_name().map_or(self.file.clone(), |n| n.to_string_lossy().into_owned());
        // Writing to a string cannot fail.
        let _ = match &self.outcome {
            Outcome::Replayed(replayed) => {
                let Replayed { rule, dtypes, steps, tolerance: Tolerance { rtol, atol }, difference, .. } =
                    &**replayed;
                let Difference { values, absolute, relative, ulps, .. } = difference;
                writeln!(
                    table,
                    "| {name} | {rule} | {dtypes} | {steps} | {values} | {:.1e} | {:.1e} | {} | {rtol:.1e}, {atol:.1e} |",
                    absolute.value, relative.value, ulps.value
                )
            }
            Outcome::CannotBeReplayed(reason) => writeln!(table, "| {name} | {reason} |"),
        };
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.file)?;
        let replayed = match &self.outcome {
            Outcome::Replayed(replayed) => replayed,
            Outcome::CannotBeReplayed(reason) => return write!(f, "cannot be replayed: {reason}"),
        };
        let Difference { tensors, values, absolute, relative, ulps, outside, worst } = &replayed.difference;
        match worst {
            None => write!(f, "agrees")?,
            Some(worst) => write!(f, "DIFFERS in {outside} values, {worst}")?,
        }
        write!(
            f,
            "; {tensors} tensors ({values} values), largest difference absolute {:.1e}",
            absolute.value
        )?;
        write!(f, "{}, relative {:.1e}{}", place(absolute), relative.value, place(relative))?;
        write!(f, ", {} ulp{}", ulps.value, place(ulps))
    }
}

fn place(largest: &Largest) -> String {
    largest.at.as_ref().map_or(String::new(), |at| format!(" ({at})"))
}

impl Report {
    /// Returns the worst verdict of all files.
    pub(super) fn verdict(&self) -> Verdict {
        self.files.iter().map(Line::verdict).max().unwrap_or(Verdict::Agrees)
    }

    /// Writes everything as JSON.
    pub(super) fn write_json(&self, path: &Path) -> Result<(), Reason> {
        let mut json = serde_json::to_string_pretty(self)?;
        json.push('\n');
        write("json", path, &json)
    }

    /// Writes a table in Markdown.
    pub(super) fn write_table(&self, path: &Path) -> Result<(), Reason> {
        write("table", path, &self.table())
    }

    /// Returns the table, with one row for each file.
    pub(super) fn table(&self) -> String {
        let mut table = "# Largest differences between traces and their replay\n\n\
            Written by `cargo xtask parity FILE... --table OUT`. For each trace: the largest absolute and relative difference\n\
            of any expected parameter, state, norm or loss, the largest number of representable values in between, and the\n\
            tolerance. For numbers near 0, such as a gradient's norm at a minimum, only the absolute difference is meaningful.\n\n\
            | trace | rule | type | steps | values | absolute | relative | ulp | rtol, atol |\n\
            |---|---|---|---|---|---|---|---|---|\n"
            .to_owned();
        let mut files: Vec<&Line> = self.files.iter().collect();
        files.sort_by(|a, b| a.file.cmp(&b.file));
        files.into_iter().for_each(|line| line.row(&mut table));
        table
    }
}

fn write(option: &'static str, path: &Path, text: &str) -> Result<(), Reason> {
    let path_buf = || PathBuf::from(path);
    fs::write(path, text).map_err(|source| Reason::Output { option, path: path_buf(), source })
}
