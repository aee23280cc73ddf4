//! Steps and tasks as values, the settings they depend on, and runs of tests as tasks.

use super::{book, mpi, nccl_abi, pages, watched};
use crate::cli::StepName;
use crate::cmd::Cmd;
use std::fmt;
use std::path::PathBuf;
use std::thread;

/// Settings that the steps depend on.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    /// Run the full case counts.
    pub(crate) long: bool,
    /// Run as a CI job, which requires a clean tree.
    pub(crate) on_ci: bool,
    /// PROPTEST_CASES as set by the caller.
    pub(crate) cases: Option<String>,
}

#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) name: StepName,
    pub(crate) tasks: Vec<Task>,
}

/// One task of a step.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    Run(Cmd),
    /// Run nextest; its report has the time of each test.
    Test(Cmd),
    /// Install nextest if it is missing.
    Nextest,
    /// Install mdBook, or build the book with it.
    Book(book::Task),
    /// Make a report, or look at its page.
    Pages(pages::PageTask),
    /// Compare comm's table of NCCL functions with NCCL releases.
    NcclAbi(nccl_abi::Check),
    /// Run a command of a toolchain that may be missing.
    Watched(watched::Watched),
    /// Install packages of an MPI library unless its programs are there.
    MpiPackages(mpi::Library),
    Tidy,
    /// Compare the committed PTX with fresh PTX, and the kernels' resource usage on this chip, or on all chips, with the
    /// budget.
    Ptx {
        chip: Option<&'static str>,
    },
    /// Check that the help text which this command prints has every flag of `train` that a document shows.
    ShownFlags(Cmd),
    /// Create this folder, or empty it.
    Empty(PathBuf),
    /// Build the stand-ins for a GPU from the tree at `root`.
    Standins {
        root: PathBuf,
        into: PathBuf,
    },
    /// Write the crate outside the workspace with the candle recipe of tensor's README.
    WriteRecipe {
        dir: PathBuf,
    },
    /// Print the sizes of the packages.
    PackageSizes,
    /// Make the unpacked packages a workspace of their own.
    PackagesWorkspace,
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(cmd) | Self::Test(cmd) => write!(f, "{cmd}"),
            Self::Book(task) => task.fmt(f),
            Self::Pages(task) => task.fmt(f),
            Self::Nextest => f.write_str("install cargo-nextest unless it is installed"),
            Self::NcclAbi(check) => check.fmt(f),
            Self::Watched(watched) => watched.fmt(f),
            Self::MpiPackages(library) => library.fmt(f),
            Self::Tidy => f.write_str("cargo xtask tidy"),
            Self::Ptx { chip: None } => f.write_str("cargo xtask kernels --check"),
            Self::Ptx { chip: Some(chip) } => write!(f, "cargo xtask kernels --check --chip {chip}"),
            Self::ShownFlags(help) => {
                write!(f, "look up the flags in the documents in the output of: {help}")
            }
            Self::Empty(dir) => write!(f, "empty {}", dir.display()),
            Self::Standins { into, .. } => write!(f, "build the stand-ins into {}", into.display()),
            Self::WriteRecipe { dir } => {
                write!(f, "write the crate with the candle recipe of tensor's README into {}", dir.display())
            }
            Self::PackageSizes => f.write_str("print the sizes of the packages"),
            Self::PackagesWorkspace => f.write_str("make the unpacked packages a workspace"),
        }
    }
}

/// The whole workspace with every feature except `shuttle`, which replaces comm's threads by a scheduler that only comm's
/// shuttle tests start, and `cuda` of `meshstep-burn`, whose build needs LLVM. `meshstep-bench` enables all features of every library
/// but `meshstep-burn`, which it does not use. CUDA and NCCL are loaded at run time, so one build serves clippy, the documentation, the
/// tests and the stand-ins.
pub(crate) const ALL: &str = "--workspace --features meshstep-bench/cuda,meshstep-burn/checkpoint";

/// The features of [`ALL`] by package, for a subset of the packages.
pub(crate) const FEATURES: [(&str, &str); 2] = [("meshstep-bench", "cuda"), ("meshstep-burn", "checkpoint")];

/// nextest filter for the tests that need a GPU or its stand-in: the modules `cuda` and `nccl` of the test suites.
pub(crate) const ON_GPU: &str = "kind(test) & test(/^(cuda|nccl)::/)";

/// Returns a nextest run of the tests of `what` that match `filter`. Each test runs in its own process, two at a time on
/// each core, because ranks wait for one another and tests of deadlines wait for time to pass.
pub(crate) fn test(what: &str, filter: &str, setting: &Setting) -> Task {
    let threads = 2 * thread::available_parallelism().map_or(1, usize::from);
    let line = format!(
        "nextest run --config-file xtask/nextest.toml --test-threads {threads} --no-fail-fast {what} -E"
    );
    Task::Test(counted(Cmd::cargo(&line).arg(filter).dir(&setting.root), setting))
}

/// Adds an environment variable to the task.
pub(crate) fn with(task: Task, name: &str, value: &str) -> Task {
    match task {
        Task::Run(cmd) => Task::Run(cmd.env(name, value)),
        Task::Test(cmd) => Task::Test(cmd.env(name, value)),
        other => other,
    }
}

/// Sets the case counts: a long run takes the full counts from MESHSTEP_CASES, other runs use the tests' defaults.
pub(super) fn counted(cmd: Cmd, setting: &Setting) -> Cmd {
    if !setting.long {
        return cmd;
    }
    // Applies to properties without a count of their own; the caller's PROPTEST_CASES takes precedence.
    let cases = setting.cases.as_deref().unwrap_or("4096");
    cmd.env("MESHSTEP_CASES", "long").env("PROPTEST_CASES", cases)
}
