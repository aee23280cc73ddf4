//! Environment of the program.

use meshstep_bench_cases::gpu::{Result, stages};
use std::path::PathBuf;

pub(crate) struct Settings {
    pub(crate) model: String,
    /// Steps of each case after the first.
    pub(crate) rounds: usize,
    /// Time budget in seconds.
    pub(crate) seconds: Option<f64>,
    /// A substring of the cases' names.
    only: Option<String>,
    /// Output file.
    pub(crate) path: Option<PathBuf>,
}

impl Settings {
    pub(crate) fn read() -> Result<Self> {
        let model = text("GPU_BENCH_MODEL").unwrap_or_else(|| "gpt2-xl".to_owned());
        stages::layout(&model)?;
        Ok(Settings {
            model,
            rounds: number("GPU_BENCH_STEPS", "a whole number")?.unwrap_or(3).max(1),
            seconds: number("GPU_BENCH_SECONDS", "a number of seconds")?,
            only: text("GPU_BENCH_ONLY"),
            path: std::env::var_os("OUT").map(|out| PathBuf::from(out).join("stages.json")),
        })
    }

    /// Returns true if a case with this name is selected.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|part| name.contains(part))
    }
}

fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

/// Reads a number from the environment.
fn number<T: std::str::FromStr>(name: &str, expected: &str) -> Result<Option<T>> {
    let Some(text) = std::env::var_os(name) else { return Ok(None) };
    let number = text.to_str().and_then(|text| text.parse().ok());
    number.map(Some).ok_or_else(|| format!("{name} is {text:?}; set it to {expected}").into())
}
