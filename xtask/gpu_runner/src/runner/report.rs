//! `results.json`: one row for each program of the run. The file is replaced as a whole, so a reader never sees a partial
//! file.

use super::settings::Limits;
use anyhow::Context;
use serde::Serialize;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// Commit from which the bundle was built.
    pub(crate) commit: String,
    pub(crate) date: String,
    pub(crate) gpu: String,
    pub(crate) driver: String,
    pub(crate) mode: &'static str,
    pub(crate) limits: Limits,
    /// True if the driver is the stand-in; then no figure applies to a GPU.
    pub(crate) stand_in: bool,
    pub(crate) ended: Ended,
    pub(crate) rows: Vec<Row>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Ended {
    Running,
    Done,
    Deadline,
    Signal,
}

/// A program and the result of its run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    pub(crate) program: String,
    pub(crate) kind: Kind,
    pub(crate) verdict: Verdict,
    /// Exit status of the program's last process.
    pub(crate) exit: Option<i32>,
    /// Signal that ended the program's last process.
    pub(crate) signal: Option<i32>,
    pub(crate) seconds: f64,
    /// Number of tests that passed.
    pub(crate) passed: usize,
    pub(crate) failed: Vec<String>,
    /// Tests that exceeded the time limit of a test.
    pub(crate) hung: Vec<String>,
    /// Tests that ended their process, for example by a crash.
    pub(crate) crashed: Vec<String>,
    /// Number of tests that printed "skipped: " or are ignored.
    pub(crate) skipped: usize,
    /// Number of tests without a result.
    pub(crate) not_run: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Smoke,
    Bench,
    Torch,
    Stages,
    Tests,
    Nccl,
    Profile,
    Sanitizer,
    Cpu,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub(crate) enum Verdict {
    NotRun,
    Running,
    Passed,
    Failed,
    Hung,
    Crashed,
    RanNoTest,
    NoTestList,
    /// The runner ended the program at its time limit.
    OverLimit,
    /// The runner ended the program at the run's deadline.
    AtDeadline,
    /// The runner ended the program because the runner received a signal.
    BySignal,
    NotStarted(String),
    /// Skipped, with the reason.
    Skipped(String),
}

impl Row {
    pub(crate) fn new(program: &str, kind: Kind) -> Row {
        Row {
            program: program.to_owned(),
            kind,
            verdict: Verdict::NotRun,
            exit: None,
            signal: None,
            seconds: 0.0,
            passed: 0,
            failed: Vec::new(),
            hung: Vec::new(),
            crashed: Vec::new(),
            skipped: 0,
            not_run: 0,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::NotRun => f.write_str("not run"),
            Verdict::Running => f.write_str("running"),
            Verdict::Passed => f.write_str("ok"),
            Verdict::Failed => f.write_str("failed"),
            Verdict::Hung => f.write_str("hung"),
            Verdict::Crashed => f.write_str("crashed"),
            Verdict::RanNoTest => f.write_str("ran no test"),
            Verdict::NoTestList => f.write_str("no test list"),
            Verdict::OverLimit => f.write_str("ended at its limit"),
            Verdict::AtDeadline => f.write_str("ended at the deadline"),
            Verdict::BySignal => f.write_str("ended by a signal to the runner"),
            Verdict::NotStarted(reason) => write!(f, "cannot start: {reason}"),
            Verdict::Skipped(reason) => write!(f, "skipped: {reason}"),
        }
    }
}

impl From<Verdict> for String {
    fn from(verdict: Verdict) -> String {
        verdict.to_string()
    }
}

impl Report {
    /// Returns true if the run was completed, at least one row passed, and every other row passed or was skipped.
    pub(crate) fn success(&self) -> bool {
        let good = |row: &Row| matches!(row.verdict, Verdict::Passed | Verdict::Skipped(_));
        let ran = self.rows.iter().any(|row| row.verdict == Verdict::Passed);
        self.ended == Ended::Done && ran && self.rows.iter().all(good)
    }

    pub(crate) fn write(&self, out: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self).context("cannot encode results.json")? + "\n";
        replace(&out.join("results.json"), |part| fs::write(part, text))
    }
}

/// Writes a file under a temporary name, then renames it to `path`. A reader sees the old file or the new one.
pub(crate) fn replace(path: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> anyhow::Result<()> {
    let part = part_of(path);
    let written = write(&part).and_then(|()| fs::rename(&part, path));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// Returns the temporary name `.NAME.part` in the same folder.
fn part_of(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.part"))
}

/// Removes the temporary files that a killed program or runner left in `out`.
pub(crate) fn remove_parts(out: &Path) {
    let Ok(entries) = fs::read_dir(out) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') && name.ends_with(".part") {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(verdicts: &[Verdict]) -> Report {
        let row = |verdict: &Verdict| Row { verdict: verdict.clone(), ..Row::new("a", Kind::Tests) };
        Report {
            commit: "0123".to_owned(),
            date: "2026-01-02T03:04:05Z".to_owned(),
            gpu: "unknown".to_owned(),
            driver: "unknown".to_owned(),
            mode: "tests",
            limits: Limits::default(),
            stand_in: false,
            ended: Ended::Done,
            rows: verdicts.iter().map(row).collect(),
        }
    }

    #[test]
    fn success_takes_a_row_that_passed_and_none_that_did_not() {
        let skipped = Verdict::Skipped("no ncu".to_owned());
        assert!(report(&[Verdict::Passed, skipped.clone()]).success());
        assert!(!report(std::slice::from_ref(&skipped)).success());
        assert!(!report(&[]).success());
        for bad in [Verdict::Failed, Verdict::NotRun, Verdict::Hung, Verdict::RanNoTest, Verdict::OverLimit] {
            assert!(!report(&[Verdict::Passed, bad.clone()]).success(), "{bad}");
        }
        assert!(!Report { ended: Ended::Deadline, ..report(&[Verdict::Passed]) }.success());
    }

    #[test]
    fn rows_are_plain_json() {
        let json = serde_json::to_value(report(&[Verdict::Skipped("no ncu".to_owned())])).unwrap();
        assert_eq!((&json["ended"], &json["limits"]["deadline"]), (&"done".into(), &540.0.into()));
        let row = &json["rows"][0];
        assert_eq!((&row["verdict"], &row["kind"]), (&"skipped: no ncu".into(), &"tests".into()));
        assert_eq!((&row["exit"], &row["failed"]), (&serde_json::Value::Null, &serde_json::json!([])));
    }
}
