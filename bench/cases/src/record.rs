//! The benchmark's file: it has a row for each case from the start, and is replaced as a whole whenever a row changes.

use serde_json::{Map, Value, json};
use std::fmt::Display;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Result of a row.
pub enum Outcome {
    /// Figures of the case: a JSON object.
    Measured(Value),
    /// The case failed, with the reason.
    Failed(String),
    /// The case was left out, with the reason.
    NotRun(String),
}

impl Outcome {
    /// Measures a case. Errors and panics become the outcome of this case, and the next case still runs.
    pub fn of<E: Display>(measure: impl FnOnce() -> Result<Value, E>) -> Self {
        match catch_unwind(AssertUnwindSafe(measure)) {
            Ok(Ok(figures)) => Outcome::Measured(figures),
            Ok(Err(error)) => Outcome::Failed(format!("{error:#}")),
            Err(panic) => {
                let message = panic.downcast_ref::<String>().map(String::as_str);
                let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
                Outcome::Failed(format!("the case panicked: {}", message.unwrap_or("without a message")))
            }
        }
    }
}

/// All rows, and the properties that all rows share.
pub struct Record {
    /// File to write, or `None`.
    path: Option<PathBuf>,
    about: Map<String, Value>,
    heads: Vec<Value>,
    rows: Vec<Value>,
}

impl Record {
    /// Creates a record of rows that have not run; `heads` are objects that identify the rows, and `about` is an object.
    pub fn new(path: Option<PathBuf>, about: &Value, heads: Vec<Value>) -> std::io::Result<Self> {
        let about = about.as_object().cloned().unwrap_or_default();
        let mut rows = heads.clone();
        rows.iter_mut().for_each(|row| row["not_run"] = "not begun".into());
        let record = Record { path, about, heads, rows };
        record.write()?;
        Ok(record)
    }

    /// Sets a property that all rows share.
    pub fn about(&mut self, key: &str, value: Value) -> std::io::Result<()> {
        self.about.insert(key.to_owned(), value);
        self.write()
    }

    /// Sets the result of row `idx`.
    pub fn set(&mut self, idx: usize, outcome: Outcome) -> std::io::Result<&Value> {
        let result = match outcome {
            Outcome::Measured(figures) => figures,
            Outcome::Failed(error) => json!({ "error": error }),
            Outcome::NotRun(reason) => json!({ "not_run": reason }),
        };
        let mut row = self.heads[idx].clone();
        for (key, value) in result.as_object().into_iter().flatten() {
            row[key] = value.clone();
        }
        self.rows[idx] = row;
        self.write()?;
        Ok(&self.rows[idx])
    }

    /// Returns the rows in order.
    pub fn rows(&self) -> &[Value] {
        &self.rows
    }

    /// Returns the number of rows with an error.
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

/// Writes a file under a temporary name first, so that a reader sees the old text or the new text.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let part = path.with_file_name(format!(".{name}.part"));
    fs::write(&part, text)?;
    fs::rename(&part, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &Path) -> Value {
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn the_file_is_whole_after_every_row() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bench.json");
        let heads = (0..4).map(|i| json!({ "name": format!("case {i}") })).collect();
        let mut record = Record::new(Some(path.clone()), &json!({ "device": "one" }), heads).unwrap();
        assert_eq!(
            (&read(&path)["device"], &read(&path)["cases"][3]["not_run"]),
            (&"one".into(), &"not begun".into())
        );
        record.set(0, Outcome::Measured(json!({ "ms": 8.0 }))).unwrap();
        assert_eq!(read(&path)["cases"][0], json!({ "name": "case 0", "ms": 8.0 }));
        record.set(1, Outcome::Failed("no memory".to_owned())).unwrap();
        record.set(2, Outcome::NotRun("no time".to_owned())).unwrap();
        record.about("after", json!({ "watts": 300 })).unwrap();
        let all = read(&path);
        assert_eq!(all["cases"][1], json!({ "name": "case 1", "error": "no memory" }));
        assert_eq!((&all["cases"][2]["not_run"], &all["after"]["watts"]), (&"no time".into(), &300.into()));
        assert_eq!(record.errors(), 1);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "a temporary file was left");
    }

    #[test]
    fn an_error_or_a_panic_is_the_outcome_of_its_case() {
        let failed = |outcome| match outcome {
            Outcome::Failed(reason) => reason,
            _ => panic!("the case has not failed"),
        };
        assert_eq!(failed(Outcome::of(|| Err("not the CPU's"))), "not the CPU's");
        assert_eq!(failed(Outcome::of::<String>(|| panic!("of {}", 1))), "the case panicked: of 1");
    }
}
