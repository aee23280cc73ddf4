//! PyTorch in a virtual environment of the target folder.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::{Value, json};

use super::Program;

/// What it is measured against.
const VERSION: &str = "2.11.0";

/// Before and after a turn. PyTorch's threads (OpenMP) go on looking for work for some milliseconds after they have done it, on cores
/// that the next one would have.
const REST: Duration = Duration::from_millis(20);

/// PyTorch, waiting to be told.
#[derive(Debug)]
pub(crate) struct Torch {
    program: Program,
    /// As it says itself.
    pub(crate) version: String,
}

impl Torch {
    /// Starts it, after it was installed into `folder` where it is not there yet: 5 GB from PyPI.
    pub(crate) fn start(folder: &Path) -> Result<Self> {
        let python = environment(folder)?;
        let script = Path::new(crate::FOLDER).join("python/peers.py");
        let program = Program::start("PyTorch", Command::new(python).arg(script))?;
        let mut torch = Torch { program, version: String::new() };
        let answer = torch.case(json!({ "case": "sgd fused", "length": 1 }))?;
        torch.version = answer["version"].as_str().unwrap_or(VERSION).to_owned();
        Ok(torch)
    }

    /// Prepares a case of the script.
    pub(crate) fn case(&mut self, case: Value) -> Result<Value> {
        let answer = self.ask(&case)?;
        ensure!(answer["ready"] == true, "PyTorch has answered {answer} to {case}");
        Ok(answer)
    }

    /// Runs it once, while no thread of the turn before is awake; seconds.
    pub(crate) fn run(&mut self) -> Result<f64> {
        sleep(REST);
        let answer = self.ask(&json!({ "run": true }))?;
        sleep(REST);
        answer["seconds"].as_f64().ok_or_else(|| anyhow!("PyTorch has answered {answer}"))
    }

    fn ask(&mut self, what: &Value) -> Result<Value> {
        let answer = self.program.ask(&what.to_string())?;
        let answer: Value =
            serde_json::from_str(&answer).with_context(|| format!("PyTorch has answered {answer}"))?;
        match answer.get("error") {
            Some(error) => bail!("PyTorch, with {what}: {error}"),
            None => Ok(answer),
        }
    }
}

/// The interpreter of an environment with PyTorch.
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
        "PyTorch {VERSION} was installed into {}, and is not there",
        folder.display()
    );
    Ok(python)
}

fn run(what: &str, command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{what}: {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{what}: {}", said.lines().last().unwrap_or("it says nothing"));
    Ok(())
}
