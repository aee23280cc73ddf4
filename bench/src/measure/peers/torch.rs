//! PyTorch in a virtual environment in the target folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::TorchPair;

/// Version of PyTorch to compare with.
const VERSION: &str = "2.11.0";

/// Starts PyTorch, and installs it into `folder` if necessary: 5 GB from PyPI.
pub(crate) fn start(folder: &Path) -> Result<TorchPair> {
    TorchPair::start(&environment(folder)?, &Path::new(crate::args::FOLDER).join("python/peers.py"))
}

/// Returns the interpreter of an environment with PyTorch.
pub(super) fn environment(folder: &Path) -> Result<PathBuf> {
    let python = folder.join("bin").join("python");
    let has_torch = |python: &Path| {
        let code = format!("import torch; assert torch.__version__.split('+')[0] == '{VERSION}'");
        Command::new(python).args(["-c", &code]).output().is_ok_and(|output| output.status.success())
    };
    if has_torch(&python) {
        return Ok(python);
    }
    run("making a virtual environment", Command::new("python3").args(["-m", "venv"]).arg(folder))?;
    let pip = ["-m", "pip", "install", "--quiet", &format!("torch=={VERSION}"), "numpy"].map(str::to_owned);
    run("installing PyTorch", Command::new(&python).args(pip))?;
    ensure!(
        has_torch(&python),
        "PyTorch {VERSION} was installed into {}, but cannot be imported",
        folder.display()
    );
    Ok(python)
}

fn run(what: &str, command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{what}: {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{what}: {}", said.lines().last().unwrap_or("no error message"));
    Ok(())
}
