//! The benchmark's file: a row for each case, from the beginning; the file is replaced as a whole whenever a row changes.

use super::Result;
use super::race::Measured;
use super::rows::{Row, Work};
use serde_json::{Map, Value, json};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// The result of a row.
pub enum Outcome {
    Measured(Measured),
    /// The case failed, for this reason.
    Failed(String),
    /// The case was left out, for this reason.
    NotRun(String),
}

impl Outcome {
    /// Measures a case. An error and a panic are the case's own: the next one goes on.
    pub fn of(measure: impl FnOnce() -> Result<Measured>) -> Self {
        match catch_unwind(AssertUnwindSafe(measure)) {
            Ok(Ok(measured)) => Outcome::Measured(measured),
            Ok(Err(error)) => Outcome::Failed(error.to_string()),
            Err(panic) => {
                let message = panic.downcast_ref::<String>().map(String::as_str);
                let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
                Outcome::Failed(format!("the case panicked: {}", message.unwrap_or("without a message")))
            }
        }
    }
}

/// All rows, and what holds for all of them.
pub struct Record {
    /// None: no file.
    path: Option<PathBuf>,
    about: Map<String, Value>,
    rows: Vec<Value>,
}

impl Record {
    /// A record of these rows, none of which has run; `about` is an object.
    pub fn new(path: Option<PathBuf>, about: &Value, rows: &[Row]) -> std::io::Result<Self> {
        let row = |row: &Row| json!({ "name": row.name, "params": row.params, "not_run": "not begun" });
        let about = about.as_object().cloned().unwrap_or_default();
        let record = Record { path, about, rows: rows.iter().map(row).collect() };
        record.write()?;
        Ok(record)
    }

    /// Sets something that holds for all rows.
    pub fn about(&mut self, key: &str, value: Value) -> std::io::Result<()> {
        self.about.insert(key.to_owned(), value);
        self.write()
    }

    /// Sets the result of row `idx`.
    pub fn set(&mut self, idx: usize, row: &Row, outcome: &Outcome) -> std::io::Result<&Value> {
        let mut result = match outcome {
            Outcome::Measured(measured) => figures(row, measured),
            Outcome::Failed(error) => json!({ "error": error }),
            Outcome::NotRun(reason) => json!({ "not_run": reason }),
        };
        result["name"] = row.name.as_str().into();
        result["params"] = row.params.into();
        self.rows[idx] = result;
        self.write()?;
        Ok(&self.rows[idx])
    }

    /// The rows, in their order.
    pub fn rows(&self) -> &[Value] {
        &self.rows
    }

    /// Rows with an error.
    pub fn errors(&self) -> usize {
        self.rows.iter().filter(|row| row.get("error").is_some()).count()
    }

    fn write(&self) -> std::io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut report = self.about.clone();
        report.insert("cases".to_owned(), self.rows.clone().into());
        replace(path, &format!("{:#}\n", Value::from(report)))
    }
}

/// Writes a file under another name first, so that a reader sees the old text or the new one.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let part = path.with_file_name(format!(".{name}.part"));
    fs::write(&part, text)?;
    fs::rename(&part, path)
}

/// What is told of a case. One for which the host waited more often than it needs is an error, with its figures.
fn figures(row: &Row, Measured { compared, first_step, waits, times, issue }: &Measured) -> Value {
    let (took, copy) = (median(&times.case), median(&times.copy));
    let bytes = row.bytes_each() as f64 * row.params as f64;
    let floor = copy * bytes / times.copied as f64;
    let mut figures = json!({
        "bytes_per_element": row.bytes_each(),
        "bytes": bytes,
        "ms": took * 1e3,
        "floor_ms": floor * 1e3,
        "share_of_floor": floor / took,
        "gb_per_s": bytes / took / 1e9,
        "issue_slots_percent": issue.map(|seconds| 100.0 * seconds / took),
        "copy_gb_per_s": times.copied as f64 / copy / 1e9,
        "first_step_ms": first_step.map(|seconds| seconds * 1e3),
        "rounds": times.case.len(),
        "compared_with_cpu": compared,
        "host_waits_per_step": waits.per_step,
        "host_was_ahead": waits.ahead,
    });
    if let Work::Variant(variant) = &row.work {
        let base = median(&times.base);
        figures["base"] = variant.base.into();
        figures["change"] = variant.change.as_str().into();
        figures["base_ms"] = (base * 1e3).into();
        figures["time_of_base"] = (took / base).into();
    }
    if waits.per_step > row.waits() {
        let error = format!("the host waited {} times in a step that needs {}", waits.per_step, row.waits());
        figures["error"] = error.into();
    }
    figures
}

/// The middle one, or the mean of the two in the middle; NaN of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::rows;
    use super::super::{Times, Waits};
    use super::*;

    fn measured(per_step: f64) -> Outcome {
        let [copy, case, base] =
            [[2e-3, 1e-3, 3e-3], [8e-3, 7e-3, 9e-3], [16e-3, 1.0, 1e-3]].map(|times| times.to_vec());
        let times = Times { copy, case, base, copied: 8 << 20 };
        let waits = Waits { per_step, ahead: true };
        Outcome::Measured(Measured { compared: 7, first_step: Some(0.5), waits, times, issue: Some(2e-3) })
    }

    fn read(path: &Path) -> Value {
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn the_file_is_whole_after_every_row() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gpu-bench.json");
        let rows = &rows(1 << 20, 3)[..4];
        let mut record = Record::new(Some(path.clone()), &json!({ "device": "one" }), rows).unwrap();
        assert_eq!(
            (&read(&path)["device"], &read(&path)["cases"][3]["not_run"]),
            (&"one".into(), &"not begun".into())
        );
        record.set(0, &rows[0], &measured(0.0)).unwrap();
        let row = &read(&path)["cases"][0];
        // 28 bytes of 2^20 parameters in 8 ms; a copy moves 8 of them in 2 ms.
        assert_eq!(
            (&row["bytes"], &row["ms"], &row["floor_ms"]),
            (&29360128.0.into(), &8.0.into(), &7.0.into())
        );
        assert_eq!((&row["share_of_floor"], &row["first_step_ms"]), (&0.875.into(), &500.0.into()));
        assert_eq!((&row["issue_slots_percent"], row.get("base_ms")), (&25.0.into(), None));
        record.set(1, &rows[1], &Outcome::Failed("no memory".to_owned())).unwrap();
        record.set(2, &rows[2], &Outcome::NotRun("no time".to_owned())).unwrap();
        record.about("after", json!({ "watts": 300 })).unwrap();
        let all = read(&path);
        assert_eq!(
            (&all["cases"][1]["error"], &all["cases"][1]["name"]),
            (&"no memory".into(), &rows[1].name.as_str().into())
        );
        assert_eq!((&all["cases"][2]["not_run"], &all["after"]["watts"]), (&"no time".into(), &300.into()));
        assert_eq!(record.errors(), 1);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no part of a file stays");
    }

    #[test]
    fn a_wait_that_is_not_needed_is_an_error_with_figures() {
        let all = rows(1 << 20, 3);
        let direction = all.iter().position(|row| row.waits() > 0.0).unwrap();
        let mut record = Record::new(None, &json!({}), &all).unwrap();
        record.set(direction, &all[direction], &measured(1.0)).unwrap();
        assert_eq!(record.errors(), 0);
        let row = record.set(0, &all[0], &measured(1.0)).unwrap().clone();
        assert_eq!(row["error"], "the host waited 1 times in a step that needs 0");
        assert_eq!((&row["ms"], record.errors()), (&8.0.into(), 1));
    }

    #[test]
    fn a_variant_has_its_base_beside_it() {
        let all = rows(1 << 20, 3);
        let variant = all.iter().position(|row| row.name == "adamw f32 | a block a tile").unwrap();
        let mut record = Record::new(None, &json!({}), &all).unwrap();
        let row = record.set(variant, &all[variant], &measured(0.0)).unwrap();
        assert_eq!((&row["base"], &row["change"]), (&"adamw f32".into(), &"a block a tile".into()));
        assert_eq!((&row["base_ms"], &row["time_of_base"]), (&16.0.into(), &0.5.into()));
    }

    #[test]
    fn an_error_or_a_panic_is_the_outcome_of_its_case() {
        let failed = |outcome| match outcome {
            Outcome::Failed(reason) => reason,
            _ => panic!("the case has not failed"),
        };
        assert_eq!(failed(Outcome::of(|| Err("not the CPU's".into()))), "not the CPU's");
        assert_eq!(failed(Outcome::of(|| panic!("of {}", 1))), "the case panicked: of 1");
    }

    #[test]
    fn medians() {
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0, 2.0, 3.0])), (2.0, 2.5));
        assert!(median(&[]).is_nan());
    }
}
