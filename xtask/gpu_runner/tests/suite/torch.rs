//! `gpu_torch.py` on a stand-in for torch: a failing case is a row, the time budget holds, and the file is complete after
//! each case.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The part of torch that the script uses, without any arithmetic. The step of SGD raises an out-of-memory error; each step
/// of AdamW sleeps for `STEP` seconds.
const TORCH: &str = r#"
import os, time, types

__version__ = "stand-in"
version = types.SimpleNamespace(cuda=None)
float32, bfloat16 = "float32", "bfloat16"

class OutOfMemoryError(RuntimeError):
    pass

cuda = types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError, is_available=lambda: False)

class Tensor:
    grad = None
    def uniform_(self, *_):
        return self
    copy_ = uniform_
    def __getitem__(self, _):
        return Tensor()

def empty(*_, **__):
    return Tensor()

ones = empty_like = empty

def mul(*_, out):
    return out

def no_grad():
    return lambda function: function

class Optimizer:
    def __init__(self, params, **options):
        self.options = options

class SGD(Optimizer):
    def step(self):
        raise OutOfMemoryError("no room\nmore")

class AdamW(Optimizer):
    def step(self):
        time.sleep(float(os.environ.get("STEP", "0")))

class LBFGS(Optimizer):
    def step(self, closure):
        for _ in range(self.options["max_iter"]):
            closure()

optim = types.SimpleNamespace(SGD=SGD, AdamW=AdamW, LBFGS=LBFGS)
linalg = types.SimpleNamespace(vector_norm=lambda *_, **__: 0)
clip = types.SimpleNamespace(clip_grad_norm_=lambda *_: 0)
nn = types.SimpleNamespace(Parameter=lambda tensor: Tensor(), utils=clip)
"#;

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-torch").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("torch.py"), TORCH).unwrap();
    folder
}

/// Runs the script. Returns `None` without python3.
fn run(folder: &Path, env: &[(&str, &str)]) -> Option<(Output, Value)> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/python/gpu_torch.py");
    let mut python = Command::new("python3");
    python
        .arg(script)
        .arg(folder)
        .arg("--trial")
        .env("PYTHONPATH", folder)
        .env("PYTHONDONTWRITEBYTECODE", "1");
    for name in ["GPU_BENCH_LOG2", "GPU_BENCH_ROUNDS", "GPU_BENCH_SECONDS", "GPU_BENCH_ONLY"] {
        python.env_remove(name);
    }
    let output = match python.envs(env.iter().copied()).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: no python3");
            return None;
        }
        output => output.unwrap(),
    };
    let text = fs::read(folder.join("torch-bench.json"));
    let text = text.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    Some((output, serde_json::from_slice(&text).unwrap()))
}

#[test]
fn a_case_without_memory_is_a_row_and_the_rest_goes_on() {
    let folder = folder("errors");
    let Some((output, report)) = run(&folder, &[("GPU_BENCH_LOG2", "21")]) else { return };
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let first = &report["runs"][0];
    assert_eq!(first["errors"]["sgd momentum f32"], "OutOfMemoryError: no room");
    assert_eq!(first["errors"].as_object().unwrap().len(), 2, "{report:#}");
    for name in [
        "adamw f32",
        "adamw f32, foreach",
        "clip_grad_norm_ f32",
        "adamw f32, 10000 segments",
        "exact norm bf16, 2^20",
        "lbfgs direction, history of 10",
    ] {
        assert!(first["ms"][name].is_number(), "{name}: {report:#}");
    }
    assert!(first["ms"]["adamw f32, 2^24"].is_null());
    assert_eq!((&report["trial"], &report["params"]), (&true.into(), &(1 << 21).into()));
    // A second run is appended, and no temporary file stays.
    let without = [("GPU_BENCH_LOG2", "21"), ("GPU_BENCH_ONLY", "adamw")];
    let (output, report) = run(&folder, &without).unwrap();
    assert_eq!((output.status.code(), report["runs"].as_array().unwrap().len()), (Some(0), 2));
    let names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
}

#[test]
fn cases_after_the_budget_are_not_run() {
    let folder = folder("budget");
    let env = [("GPU_BENCH_SECONDS", "0.3"), ("STEP", "0.02")];
    let Some((output, report)) = run(&folder, &env) else { return };
    assert_eq!(output.status.code(), Some(0));
    let run = &report["runs"][0];
    assert!(run["ms"]["adamw f32"].is_number());
    let not_run = run["not_run"].as_array().unwrap();
    assert!(not_run.contains(&"step f32".into()), "{report:#}");
    assert_eq!(run["ms"].as_object().unwrap().len() + not_run.len(), 22, "every case has a row");
}
