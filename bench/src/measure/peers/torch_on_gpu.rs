//! PyTorch's fused optimizers on a GPU: runs of `bench/python/gpu_torch.py`, each of which appends its medians to a file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::torch::environment;

/// Runs on one size.
#[derive(Debug)]
pub(crate) struct TorchOnGpu {
    python: PathBuf,
    folder: PathBuf,
    /// Number of parameters and of rounds.
    size: [usize; 2],
    /// Content of the file after the last run.
    report: Value,
}

impl TorchOnGpu {
    /// Installs PyTorch into `folder` if necessary. `len` is a power of two.
    pub(crate) fn prepare(folder: &Path, len: usize, rounds: usize) -> Result<Self> {
        let python = environment(&folder.join("venv"))?;
        let folder = folder.to_owned();
        let before = folder.join(FILE);
        // Remove the results of earlier programs.
        if before.exists() {
            fs::remove_file(&before).with_context(|| format!("removing {}", before.display()))?;
        }
        Ok(TorchOnGpu { python, folder, size: [len, rounds], report: Value::Null })
    }

    /// Runs the script once.
    pub(crate) fn run(&mut self) -> Result<()> {
        let [len, rounds] = self.size;
        let script = Path::new(crate::args::FOLDER).join("python/gpu_torch.py");
        let output = Command::new(&self.python)
            .arg(script)
            .arg(&self.folder)
            .env("GPU_BENCH_LOG2", len.ilog2().to_string())
            .env("GPU_BENCH_ROUNDS", rounds.to_string())
            .output()
            .context("starting PyTorch")?;
        let said =
            |bytes: &[u8]| String::from_utf8_lossy(bytes).lines().last().unwrap_or("nothing").to_owned();
        let path = self.folder.join(FILE);
        // The script writes no file if it finds no GPU.
        let text = fs::read(&path).with_context(|| format!("PyTorch reports: {}", said(&output.stdout)))?;
        let report: Value = serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
        // A run with failed cases has the figures of the other cases.
        let added = runs(&report) > runs(&self.report);
        ensure!(output.status.success() || added, "PyTorch reports: {}", said(&output.stderr));
        ensure!(report["params"] == len, "PyTorch has memory for {} parameters, not {len}", report["params"]);
        self.report = report;
        Ok(())
    }

    pub(crate) fn version(&self) -> &str {
        self.report["torch"].as_str().unwrap_or("of unknown version")
    }

    /// Returns the faster of the runs' medians, or `None` if PyTorch has no such case.
    pub(crate) fn seconds(&self, case: &str) -> Option<f64> {
        let runs = self.report["runs"].as_array()?.iter();
        runs.filter_map(|run| run["ms"][case].as_f64()).reduce(f64::min).map(|ms| ms / 1e3)
    }
}

fn runs(report: &Value) -> usize {
    report["runs"].as_array().map_or(0, Vec::len)
}

/// File that the script writes.
const FILE: &str = "torch-bench.json";

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Returns a python that writes this report and fails, as the script does after a failed case.
    #[cfg(unix)]
    fn failing(report: &Value) -> (tempfile::TempDir, TorchOnGpu) {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let python = folder.path().join("python");
        let path = folder.path().join(FILE);
        let text = format!("#!/bin/sh\necho '{report}' >'{}'\necho no room >&2\nexit 1\n", path.display());
        fs::write(&python, text).unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        let path = folder.path().to_owned();
        (folder, TorchOnGpu { python, folder: path, size: [4, 1], report: Value::Null })
    }

    #[cfg(unix)]
    #[test]
    fn a_run_with_a_failed_case_has_the_others() {
        let report =
            json!({ "params": 4, "runs": [{ "ms": { "step f32": 4.0 }, "errors": { "lion": "no" } }] });
        let (_folder, mut torch) = failing(&report);
        torch.run().unwrap();
        assert_eq!(torch.seconds("step f32"), Some(4e-3));
        // The second call adds no run.
        let error = torch.run().unwrap_err().to_string();
        assert!(error.contains("PyTorch reports: no room"), "{error}");
    }

    #[test]
    fn the_faster_run_counts() {
        let runs = json!([{ "ms": { "step f32": 4.0 } }, { "ms": { "step f32": 2.0 } }]);
        let report = json!({ "torch": "2", "runs": runs });
        let torch = TorchOnGpu { python: "".into(), folder: "".into(), size: [1, 1], report };
        assert_eq!((torch.seconds("step f32"), torch.seconds("lion f32")), (Some(2e-3), None));
        assert_eq!(torch.version(), "2");
    }
}
