//! Programs of each mode, in order. Reads the bundle's folders and searches the machine for tools; starts nothing.

use super::report::Kind;
use anyhow::Context;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    SmokeBench,
    Tests,
    Profile,
    Cpu,
}

/// A program to run, with its name in the results.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Step {
    pub(crate) program: String,
    pub(crate) kind: Kind,
    pub(crate) work: Work,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Work {
    /// A program that reports its result by its exit status.
    Plain { path: PathBuf, args: Vec<OsString>, env: Vec<(&'static str, &'static str)> },
    /// A test program, started through the command `before`. Runs the tests with a name that begins with an entry of
    /// `tests`, or all tests if `tests` is empty.
    /// all tests if `tests` is empty.
    Suite { path: PathBuf, before: Vec<OsString>, tests: &'static [&'static str] },
    /// No program runs, for the given reason.
    Skip(&'static str),
}

/// Cases of the benchmark that ncu profiles: an update, a norm, and a whole step.
const PROFILED: [&str; 3] = ["adamw f32", "exact norm bf16", "step bf16 + remainder, bf16 gradients"];

/// Test program that compute-sanitizer checks, and the prefixes of its tests' names.
const SANITIZED: (&str, &[&str]) =
    ("meshstep-optim-suite", &["cuda::flat::", "cuda::norm::", "cuda::step::"]);

/// Options of ncu. The skipped launches are a case's first step, which the host compares with the CPU.
const NCU: &str = "--csv --page details --set detailed --kernel-name regex:^(adam|norm|decide) --launch-skip 8 --launch-count 4";

/// Option with an exit status that test programs do not use themselves.
const SANITIZER: &str = "--error-exitcode 86 --tool";

impl Mode {
    const ALL: [Mode; 4] = [Mode::SmokeBench, Mode::Tests, Mode::Profile, Mode::Cpu];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Mode::SmokeBench => "smoke-bench",
            Mode::Tests => "tests",
            Mode::Profile => "profile",
            Mode::Cpu => "cpu",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Mode> {
        Mode::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// Returns the steps of this mode. `tool` finds a program on the machine; `out` is the results folder, `scratch` a
    /// folder for files that are not results.
    pub(crate) fn steps(
        self,
        bundle: &Path,
        [out, scratch]: [&Path; 2],
        tool: impl Fn(&str) -> Option<PathBuf>,
    ) -> anyhow::Result<Vec<Step>> {
        match self {
            Mode::SmokeBench => smoke_bench(bundle, out, tool("python3")),
            Mode::Tests => tests(bundle),
            Mode::Profile => profile(bundle, scratch, tool),
            Mode::Cpu => cpu(bundle, tool("python3")),
        }
    }
}

fn smoke_bench(bundle: &Path, out: &Path, python: Option<PathBuf>) -> anyhow::Result<Vec<Step>> {
    let mut steps = plain(bundle, "bench", Kind::Smoke, "--smoke")?;
    steps.extend(plain(bundle, "bench", Kind::Bench, "")?);
    let torch = |python| {
        let args = vec![bundle.join("gpu_torch.py").into(), out.into()];
        Work::Plain { path: python, args, env: Vec::new() }
    };
    let work = python.map_or(Work::Skip("no python3"), torch);
    steps.push(Step { program: "torch".to_owned(), kind: Kind::Torch, work });
    steps.extend(plain(bundle, "stages", Kind::Stages, "")?);
    Ok(steps)
}

/// Returns every program of the folder `cpu`, first alone and then next to PyTorch.
fn cpu(bundle: &Path, python: Option<PathBuf>) -> anyhow::Result<Vec<Step>> {
    let alone = plain(bundle, "cpu", Kind::Cpu, "--measure")?;
    let beside = plain(bundle, "cpu", Kind::Cpu, "--torch")?.into_iter().map(|step| {
        let work = match (step.work, &python) {
            (Work::Plain { path, mut args, env }, Some(python)) => {
                args.extend([python.into(), bundle.join("peers.py").into()]);
                Work::Plain { path, args, env }
            }
            _ => Work::Skip("no python3"),
        };
        Step { work, ..step }
    });
    Ok(alone.into_iter().chain(beside).collect())
}

fn tests(bundle: &Path) -> anyhow::Result<Vec<Step>> {
    let mut steps = Vec::new();
    for (folder, kind) in [("tests", Kind::Tests), ("nccl", Kind::Nccl)] {
        for path in programs(&bundle.join(folder))? {
            let work = Work::Suite { path: path.clone(), before: Vec::new(), tests: &[] };
            steps.push(Step { program: name(&path), kind, work });
        }
    }
    Ok(steps)
}

fn profile(
    bundle: &Path,
    scratch: &Path,
    tool: impl Fn(&str) -> Option<PathBuf>,
) -> anyhow::Result<Vec<Step>> {
    let mut steps = Vec::new();
    for path in programs(&bundle.join("bench"))? {
        for case in PROFILED {
            let work = tool("ncu").map_or(Work::Skip("no ncu"), |ncu| profiled(ncu, &path, scratch, case));
            steps.push(Step { program: format!("ncu: {case}"), kind: Kind::Profile, work });
        }
    }
    let (suite, tests) = SANITIZED;
    let path = bundle.join("tests").join(suite);
    for check in ["memcheck", "racecheck"] {
        let work = match tool("compute-sanitizer") {
            None => Work::Skip("no compute-sanitizer"),
            Some(_) if !path.is_file() => Work::Skip("the bundle has no meshstep-optim-suite"),
            Some(sanitizer) => {
                let before = [sanitizer.into()].into_iter().chain(words(SANITIZER)).chain([check.into()]);
                Work::Suite { path: path.clone(), before: before.collect(), tests }
            }
        };
        steps.push(Step { program: format!("{check}: {suite}"), kind: Kind::Sanitizer, work });
    }
    Ok(steps)
}

/// Returns one case of the benchmark under ncu, at a size that ncu can replay.
fn profiled(ncu: PathBuf, benchmark: &Path, scratch: &Path, case: &'static str) -> Work {
    let benchmark = [benchmark.into(), scratch.join("profiled.json").into()];
    let args = words(NCU).chain(benchmark).collect();
    let env = vec![("GPU_BENCH_CASE", case), ("GPU_BENCH_LOG2", "24"), ("GPU_BENCH_ROUNDS", "1")];
    Work::Plain { path: ncu, args, env }
}

fn words(line: &'static str) -> impl Iterator<Item = OsString> {
    line.split(' ').map(OsString::from)
}

/// Returns every program of a folder, with `arg` as its argument unless `arg` is empty.
fn plain(bundle: &Path, folder: &str, kind: Kind, arg: &str) -> anyhow::Result<Vec<Step>> {
    let args: Vec<OsString> = Some(arg).filter(|arg| !arg.is_empty()).into_iter().map(Into::into).collect();
    let step = |path: PathBuf| Step {
        program: [name(&path).as_str(), arg].join(" ").trim_end().to_owned(),
        kind,
        work: Work::Plain { path, args: args.clone(), env: Vec::new() },
    };
    Ok(programs(&bundle.join(folder))?.into_iter().map(step).collect())
}

/// Returns the files of a folder sorted by name, or nothing if the folder does not exist.
fn programs(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(folder).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
    let entries = entries.with_context(|| format!("cannot list {}", folder.display()))?;
    let mut files: Vec<PathBuf> =
        entries.into_iter().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort();
    Ok(files)
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Finds a program of the machine in PATH or in the default folder of the CUDA toolkit.
pub(crate) fn installed(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/local/cuda/bin")]);
    folders.map(|folder| folder.join(name)).find(|program| program.is_file())
}
