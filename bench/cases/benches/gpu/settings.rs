//! Arguments and environment of the benchmark.

use meshstep_bench_cases::gpu::Result;
use std::path::{Path, PathBuf};

pub(crate) struct Settings {
    pub(crate) smoke: bool,
    /// Exponent of the largest number of parameters.
    pub(crate) log2: usize,
    pub(crate) rounds: usize,
    /// Time budget in seconds.
    pub(crate) seconds: Option<f64>,
    /// A substring of names, and a whole name.
    names: [Option<String>; 2],
    /// Output file.
    pub(crate) path: Option<PathBuf>,
}

impl Settings {
    pub(crate) fn read() -> Result<Self> {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let smoke = args.iter().any(|arg| arg == "--smoke");
        // Cargo adds `--bench`.
        let given = args.iter().find(|arg| !arg.starts_with('-')).map(PathBuf::from);
        let file = if smoke { "smoke.json" } else { "gpu-bench.json" };
        let text = |name| std::env::var(name).ok().filter(|text| !text.is_empty());
        Ok(Settings {
            smoke,
            log2: number("GPU_BENCH_LOG2", "a whole number")?.unwrap_or(30),
            rounds: number("GPU_BENCH_ROUNDS", "a whole number")?.unwrap_or(51).max(1),
            seconds: number("GPU_BENCH_SECONDS", "a number of seconds")?,
            names: [text("GPU_BENCH_ONLY"), text("GPU_BENCH_CASE")],
            path: given.or_else(|| Some(Path::new(&std::env::var_os("OUT")?).join(file))),
        })
    }

    /// Returns true if a case with this name is selected.
    pub(crate) fn wants(&self, name: &str) -> bool {
        let [part, whole] = &self.names;
        part.as_ref().is_none_or(|part| name.contains(part))
            && whole.as_ref().is_none_or(|whole| name == whole)
    }
}

/// Reads a number from the environment.
fn number<T: std::str::FromStr>(name: &str, expected: &str) -> Result<Option<T>> {
    let Some(text) = std::env::var_os(name) else { return Ok(None) };
    let number = text.to_str().and_then(|text| text.parse().ok());
    number.map(Some).ok_or_else(|| format!("{name} is {text:?}; set it to {expected}").into())
}
