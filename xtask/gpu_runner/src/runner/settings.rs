//! Environment variables of the runner: the results folder, and the time limits of a run, a program and a test.

use anyhow::{Context, bail};
use serde::Serialize;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Results folder: an absolute path; the folder exists.
    pub(crate) out: PathBuf,
    pub(crate) limits: Limits,
}

/// Time limits in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Limits {
    /// Limit of the whole run.
    pub(crate) deadline: f64,
    /// Limit of each program.
    pub(crate) program: f64,
    /// Limit of each benchmark.
    pub(crate) measuring: f64,
    /// Limit of each test.
    pub(crate) test: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { deadline: 540.0, program: 90.0, measuring: 200.0, test: 30.0 }
    }
}

/// Largest allowed limit in seconds: a week.
const MOST: f64 = 7.0 * 86_400.0;

impl Settings {
    pub(crate) fn from_env() -> anyhow::Result<Settings> {
        let limits = Limits::from(|name| std::env::var_os(name))?;
        let out = std::env::var_os("OUT").map_or_else(|| PathBuf::from("results"), PathBuf::from);
        if out.as_os_str().is_empty() {
            bail!("OUT is empty; set it to a folder, or leave it unset for ./results");
        }
        std::fs::create_dir_all(&out).with_context(|| format!("OUT: cannot make {}", out.display()))?;
        let out = absolute(&out)?;
        Ok(Settings { out, limits })
    }
}

impl Limits {
    fn from(get: impl Fn(&str) -> Option<OsString>) -> anyhow::Result<Limits> {
        let default = Limits::default();
        let given = seconds("LIMIT", get("LIMIT"))?;
        Ok(Limits {
            deadline: seconds("DEADLINE", get("DEADLINE"))?.unwrap_or(default.deadline),
            program: given.unwrap_or(default.program),
            measuring: given.unwrap_or(default.measuring),
            test: seconds("TEST_LIMIT", get("TEST_LIMIT"))?.unwrap_or(default.test),
        })
    }
}

fn seconds(name: &str, text: Option<OsString>) -> anyhow::Result<Option<f64>> {
    let Some(text) = text else { return Ok(None) };
    let number = text.to_str().and_then(|text| text.trim().parse::<f64>().ok());
    match number.filter(|&number| number > 0.0 && number <= MOST) {
        Some(number) => Ok(Some(number)),
        None => bail!("{name} is {text:?}; set it to a number of seconds above 0 and at most {MOST}"),
    }
}

pub(crate) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    path.canonicalize().with_context(|| format!("cannot find {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(given: &[(&str, &str)]) -> anyhow::Result<Limits> {
        Limits::from(|name| given.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
    }

    #[test]
    fn limits_have_defaults() {
        assert_eq!(limits(&[]).unwrap(), Limits::default());
        let one = limits(&[("LIMIT", "7.5"), ("DEADLINE", " 60")]).unwrap();
        assert_eq!((one.program, one.measuring, one.deadline, one.test), (7.5, 7.5, 60.0, 30.0));
    }

    #[test]
    fn a_bad_limit_is_an_error_with_its_name_and_value() {
        for (name, value) in
            [("LIMIT", "90s"), ("DEADLINE", "0"), ("TEST_LIMIT", "-1"), ("LIMIT", "nan"), ("LIMIT", "")]
        {
            let error = limits(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(&format!("{value:?}")), "{error}");
            assert!(error.contains("a number of seconds"), "{error}");
        }
    }
}
