//! PyTorch's optimizers and gloo's collectives, run by `bench/python/peers.py`.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::{Value, json};

use super::Program;

/// Pause before and after a turn. PyTorch's threads (OpenMP) spin for some milliseconds after their work, on cores that the
/// next contestant needs.
const REST: Duration = Duration::from_millis(20);

/// Seconds of one turn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TorchTurn {
    /// Until the last rank's work has returned.
    pub seconds: f64,
    /// Until all ranks have left a closing barrier; `None` in a case of one process.
    pub with_barrier: Option<f64>,
}

/// PyTorch in a separate process that waits for commands.
#[derive(Debug)]
pub struct Torch {
    program: Program,
    /// Version that PyTorch reports.
    pub version: String,
}

impl Torch {
    /// Starts the script with an interpreter that has PyTorch.
    pub fn start(python: &Path, script: &Path) -> Result<Self> {
        Torch::start_in(python, script, &[])
    }

    /// Starts the script with additional variables in its environment.
    pub fn start_in(python: &Path, script: &Path, variables: &[(String, String)]) -> Result<Self> {
        let mut command = Command::new(python);
        let variables = variables.iter().map(|(name, value)| (name, value));
        command.arg(script).envs(variables).stderr(Stdio::null());
        let program = Program::start("PyTorch", &mut command)?;
        let mut torch = Torch { program, version: String::new() };
        let answer = torch.case(json!({ "case": "sgd fused", "length": 1 }))?;
        torch.version = answer["version"].as_str().unwrap_or("unknown").to_owned();
        Ok(torch)
    }

    /// Sets the time limit for preparing a case or for one round.
    pub fn set_patience(&mut self, patience: Duration) {
        self.program.patience = patience;
    }

    /// Prepares a case of the script.
    pub fn case(&mut self, case: Value) -> Result<Value> {
        let answer = self.ask(&case)?;
        ensure!(answer["ready"] == true, "PyTorch answered {answer} to {case}");
        Ok(answer)
    }

    /// Runs the case once, after the threads of the previous turn have gone to sleep. Returns the seconds until the last rank's work
    /// has returned.
    pub fn run(&mut self) -> Result<f64> {
        Ok(self.turn()?.seconds)
    }

    /// Runs the case once and returns all seconds.
    pub fn turn(&mut self) -> Result<TorchTurn> {
        sleep(REST);
        let answer = self.ask(&json!({ "run": true }))?;
        sleep(REST);
        let seconds = answer["seconds"].as_f64();
        let seconds = seconds.ok_or_else(|| anyhow!("PyTorch answered {answer} without `seconds`"))?;
        Ok(TorchTurn { seconds, with_barrier: answer["with_barrier"].as_f64() })
    }

    fn ask(&mut self, what: &Value) -> Result<Value> {
        let answer = self.program.ask(&what.to_string())?;
        let answer: Value = serde_json::from_str(&answer)
            .with_context(|| format!("PyTorch answered {answer}, which is not JSON"))?;
        match answer.get("error") {
            Some(error) => bail!("PyTorch, with {what}: {error}"),
            None => Ok(answer),
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    /// The part of torch that the script uses, without any arithmetic. Reduce-scatter fails.
    const MODULES: [(&str, &str); 4] = [
        (
            "__init__.py",
            r#"
import types
__version__ = "stand-in"
class Tensor:
    grad = None
    def __init__(self, length=1): self.length = length
    def __sub__(self, _): return self
    def __getitem__(self, _): return self
    def numel(self): return self.length
    def split(self, _): return [self, self]
    def div_(self, _): return self
class Generator:
    def manual_seed(self, _): return self
def rand(shape, generator=None): return Tensor(shape[0])
def ones(length): return Tensor(length)
def cat(tensors): return Tensor(sum(tensor.numel() for tensor in tensors))
def set_num_threads(_): print("noise on stdout is no answer")
class Optimizer:
    def __init__(self, params, lr, fused=False, foreach=False, momentum=0.0): pass
    def step(self): pass
optim = types.SimpleNamespace(AdamW=Optimizer, SGD=Optimizer)
nn = types.SimpleNamespace(Parameter=lambda tensor: tensor, utils=types.SimpleNamespace(clip_grad_norm_=lambda *_, **__: 0))
"#,
        ),
        ("multiprocessing.py", "from multiprocessing import get_context\n"),
        (
            "distributed/__init__.py",
            r#"
class Work:
    def wait(self): pass
def all_reduce(tensor, async_op=False): return Work()
def all_gather_into_tensor(to, part): pass
def reduce_scatter_tensor(part, tensor): raise ValueError("none here")
def init_process_group(backend, init_method, rank, world_size): assert backend == "gloo" and rank < world_size
def barrier(): pass
def destroy_process_group(): pass
"#,
        ),
        (
            "distributed/optim.py",
            "class ZeroRedundancyOptimizer:\n    def __init__(self, params, kind, **options): pass\n    def step(self): pass\n",
        ),
    ];

    #[test]
    fn the_script_prepares_and_runs_what_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in MODULES {
            let path = folder.path().join("torch").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let python = folder.path().join("python");
        fs::write(&python, "#!/bin/sh\nPYTHONPATH=$(dirname \"$0\") exec python3 -B \"$@\"\n").unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        if Command::new("python3").arg("--version").output().is_err() {
            return println!("skipped: no python3");
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../python/peers.py");
        let mut torch = Torch::start(&python, &script).unwrap();
        assert_eq!(torch.version, "stand-in");
        for case in [
            json!({ "case": "adamw fused", "length": 8, "threads": 2 }),
            json!({ "case": "adamw foreach", "count": 3, "length": 8, "clip": true, "threads": 2 }),
            json!({ "case": "collective", "operation": "all_reduce", "bytes": 64, "ranks": 2 }),
            json!({ "case": "ddp", "count": 2, "length": 8, "ranks": 2, "times": 3 }),
            json!({ "case": "zero", "count": 2, "length": 8, "ranks": 2 }),
        ] {
            torch.case(case.clone()).unwrap();
            let TorchTurn { seconds, with_barrier } = torch.turn().unwrap();
            assert!(seconds >= 0.0 && with_barrier.is_some() == case.get("ranks").is_some(), "{case}");
            assert!(with_barrier.is_none_or(|all| all >= seconds), "{case}");
        }
        let fails = json!({ "case": "collective", "operation": "reduce_scatter", "bytes": 64, "ranks": 2 });
        let error = torch.case(fails).unwrap_err().to_string();
        assert!(error.contains("ValueError: none here"), "{error}");
        torch.case(json!({ "case": "adamw fused", "length": 8 })).unwrap();
    }
}
