//! Steps of `ci` as data: their commands, their order, and the settings they depend on. Nothing runs here.

use super::{book, candle, mpi, nccl_abi, outside, standin, train};
use crate::cli::StepName;
use crate::cmd::Cmd;
use crate::workspace::{LIBRARIES, Workspace};
use clap::ValueEnum;
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
    /// Compare comm's table of NCCL functions with NCCL releases.
    NcclAbi(nccl_abi::Check),
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
    /// Write a crate outside the workspace that depends on one packaged library.
    WriteOutside {
        dir: PathBuf,
        library: &'static str,
    },
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(cmd) | Self::Test(cmd) => write!(f, "{cmd}"),
            Self::Book(task) => task.fmt(f),
            Self::Nextest => f.write_str("install cargo-nextest unless it is installed"),
            Self::NcclAbi(check) => check.fmt(f),
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
            Self::WriteOutside { dir, library } => {
                write!(f, "write a crate that uses only {library} into {}", dir.display())
            }
        }
    }
}

/// Returns the settings of this machine.
pub(crate) fn setting(workspace: &Workspace, long: bool) -> Setting {
    Setting {
        root: workspace.root.clone(),
        target: workspace.target.clone(),
        long,
        on_ci: std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false"),
        cases: std::env::var("PROPTEST_CASES").ok(),
    }
}

/// Returns the steps named in `only`, or all of them; always in the order of [`StepName`].
pub(crate) fn chosen(only: &[StepName], setting: &Setting) -> Vec<Step> {
    let short = |name: &StepName| setting.long || *name != StepName::Candle;
    let wanted = |name: &&StepName| only.contains(name) || (only.is_empty() && short(name));
    StepName::value_variants().iter().filter(wanted).map(|&name| step(name, setting)).collect()
}

/// Returns the name of a step as `--only` takes it.
pub(crate) fn id(name: StepName) -> String {
    name.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Returns the command that runs one step again.
pub(crate) fn rerun(name: StepName, long: bool) -> String {
    format!("cargo xtask ci {}--only {}", if long { "--long " } else { "" }, id(name))
}

fn step(name: StepName, setting: &Setting) -> Step {
    let cargo = |line: &str| Cmd::cargo(line).dir(&setting.root);
    let tasks = match name {
        StepName::Fmt => vec![Task::Run(cargo("fmt --all --check"))],
        StepName::Tidy => vec![Task::Tidy],
        StepName::Clippy => {
            // Also lint the shuttle tests, and the libraries and bench with default features only.
            let plain: String =
                LIBRARIES.iter().chain(&["meshstep-bench"]).map(|name| format!("-p {name} ")).collect();
            [format!("{ALL} --all-targets"), shuttle(), plain.trim_end().to_owned()]
                .map(|what| Task::Run(cargo(&format!("clippy {what} -- -D warnings"))))
                .into()
        }
        // sm_90: H100 and H200. One chip only, because assembling takes longer than compiling.
        StepName::Kernels => vec![Task::Ptx { chip: (!setting.long).then_some("sm_90") }],
        StepName::Rustdoc => {
            vec![Task::Run(cargo(&format!("doc --no-deps {ALL}")).env("RUSTDOCFLAGS", "-D warnings"))]
        }
        // The tests of CUDA kernels compile the kernels for the CPU.
        StepName::Tests => {
            let mut tasks = vec![
                Task::Nextest,
                with(test(ALL, &format!("not ({ON_GPU})"), setting), "REQUIRE_SIMT", "1"),
            ];
            if setting.long {
                // Also test the workspace without the GPU feature.
                tasks.push(test("--workspace", "all()", setting));
            }
            tasks
        }
        StepName::Standin => standin::tasks(setting),
        StepName::NcclAbi => nccl_abi::tasks(setting),
        StepName::Mpi => mpi::tasks(setting),
        StepName::Shuttle => vec![Task::Nextest, test(&shuttle(), "all()", setting)],
        StepName::Doctests => standin::doctests(setting),
        StepName::Book => book::tasks(&setting.root, &setting.target).map(Task::Book).into(),
        StepName::TrainSmoke => train::tasks(setting),
        StepName::Package => package(setting),
        StepName::Candle => candle::tasks(setting),
    };
    Step { name, tasks }
}

/// The whole workspace with every feature except `shuttle`, which replaces comm's threads by a scheduler that only comm's
/// shuttle tests start. `meshstep-bench` enables all features of every library. CUDA and NCCL are loaded at run time, so
/// one build serves clippy, the documentation, the tests and the stand-ins.
pub(super) const ALL: &str = "--workspace --features meshstep-bench/cuda";

/// The features of [`ALL`], for a subset of the packages.
pub(crate) const FEATURES: &str = "--features meshstep-bench/cuda";

/// nextest filter for the tests that need a GPU or its stand-in: the modules `cuda` and `nccl` of the test suites.
pub(crate) const ON_GPU: &str = "kind(test) & test(/^(cuda|nccl)::/)";

/// Returns the arguments for the scheduler's tests. They select from the whole workspace, to reuse the builds of the other
/// tests.
fn shuttle() -> String {
    format!("{ALL},meshstep-comm/shuttle --test shuttle")
}

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

/// Packages every library and builds a crate on each package.
///
/// Skips cargo's own verification. It keeps unpacked packages in the user's cargo home by name, version and path, so a
/// second run on the same machine would verify against the libraries of the first.
fn package(setting: &Setting) -> Vec<Task> {
    // One invocation packages all libraries, so that cargo resolves the unpublished ones among them.
    let mut pack = Cmd::cargo("package --no-verify").dir(&setting.root);
    for library in LIBRARIES {
        pack = pack.arg("-p").arg(library);
    }
    if !setting.on_ci {
        pack = pack.arg("--allow-dirty");
    }
    let packages = outside::packages(&setting.target);
    let unpack = LIBRARIES.into_iter().map(|library| {
        let archive = setting.target.join("package").join(outside::package(library) + ".crate");
        let unpack = Cmd::built("tar", "-xmzf").arg(&archive.to_string_lossy());
        Task::Run(unpack.arg("-C").arg(&packages.to_string_lossy()))
    });
    let build = LIBRARIES.into_iter().flat_map(|library| build_outside(library, setting));
    [Task::Run(pack), Task::Empty(packages.clone())].into_iter().chain(unpack).chain(build).collect()
}

fn build_outside(library: &'static str, setting: &Setting) -> [Task; 2] {
    let folder = setting.target.join("outside");
    let dir = folder.join(library);
    // One target folder for all crates, so that shared dependencies are built once. `check` finds files and dependencies
    // that are missing from a package.
    let target = folder.join("target");
    let verb = if setting.long { "build" } else { "check" };
    let build = Cmd::cargo(&format!("{verb} --target-dir")).arg(&target.to_string_lossy()).dir(&dir);
    [Task::WriteOutside { dir, library }, Task::Run(build)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting() -> Setting {
        Setting {
            root: PathBuf::from("/w"),
            target: PathBuf::from("/w/target"),
            long: false,
            on_ci: true,
            cases: None,
        }
    }

    fn shown(name: StepName, setting: &Setting) -> String {
        let tasks: Vec<String> = step(name, setting).tasks.iter().map(Task::to_string).collect();
        tasks.join("\n")
    }

    #[test]
    fn one_set_of_features_serves_every_step_that_builds_the_workspace() {
        for name in
            [StepName::Clippy, StepName::Rustdoc, StepName::Tests, StepName::Standin, StepName::Doctests]
        {
            assert!(shown(name, &setting()).contains(ALL), "{name:?}");
        }
        // The scheduler's tests add one feature to the same set.
        assert!(shown(StepName::Shuttle, &setting()).contains(&format!("{ALL},meshstep-comm/shuttle")));
        assert!(!shown(StepName::Tests, &setting()).contains("--workspace -E"));
        let long = Setting { long: true, ..setting() };
        assert!(
            shown(StepName::Tests, &long).contains("--workspace -E 'all()'"),
            "a long run must test the default features"
        );
    }

    #[test]
    fn every_test_runs_with_or_without_the_stand_ins() {
        let shown = |name| shown(name, &setting());
        assert!(
            shown(StepName::Tests).contains(&format!("-E 'not ({ON_GPU})'")),
            "{}",
            shown(StepName::Tests)
        );
        assert!(
            shown(StepName::Standin).contains(&format!("-E '({ON_GPU}) | ")),
            "{}",
            shown(StepName::Standin)
        );
    }

    #[test]
    fn the_stand_in_is_in_the_path_of_its_own_tests_only() {
        let with = "LD_LIBRARY_PATH=/w/target/standin MESHSTEP_STANDIN=1 \
                    MESHSTEP_STANDIN_KERNELS=/w/target/standin/kernels REQUIRE_GPU=1 cargo";
        let old = with.replacen("/w/target/standin", "/w/target/standin/old:/w/target/standin", 1);
        for name in StepName::value_variants() {
            let shown = self::shown(*name, &setting());
            let cargo = shown.lines().filter(|line| line.contains(" cargo "));
            let on_them = cargo.filter(|line| line.contains(with) || line.contains(&old)).count();
            let expected = match name {
                StepName::Standin => 5,
                StepName::Doctests => 1,
                _ => 0,
            };
            assert_eq!((on_them, shown.matches("LD_LIBRARY_PATH").count()), (expected, expected), "{shown}");
        }
    }

    #[test]
    fn a_short_run_measures_kernels_on_one_chip_and_a_long_one_on_each() {
        use clap::Parser;
        let short = shown(StepName::Kernels, &setting());
        assert_eq!(short, "cargo xtask kernels --check --chip sm_90");
        let long = Setting { long: true, ..setting() };
        assert_eq!(shown(StepName::Kernels, &long), "cargo xtask kernels --check");
        crate::cli::Cli::try_parse_from(short.split(' ').skip(1)).unwrap();
    }

    #[test]
    fn candle_is_checked_where_somebody_asks_for_it() {
        let (short, long) = (setting(), Setting { long: true, ..setting() });
        let has = |only: &[StepName], setting: &Setting| {
            chosen(only, setting).iter().any(|step| step.name == StepName::Candle)
        };
        assert!(!has(&[], &short) && !has(&[StepName::Fmt], &long));
        assert!(has(&[], &long) && has(&[StepName::Candle], &short));
        assert!(shown(StepName::Candle, &long).contains("NVCC=/w/xtask/standin/nvcc/nvcc"));
    }

    #[test]
    fn long_asks_every_test_step_for_its_full_counts() {
        let long = Setting { long: true, ..setting() };
        for name in [StepName::Tests, StepName::Shuttle, StepName::Doctests] {
            assert!(shown(name, &long).contains("MESHSTEP_CASES=long PROPTEST_CASES=4096 "));
            assert!(!shown(name, &setting()).contains("MESHSTEP_CASES"));
        }
        let chosen = Setting { cases: Some("7".to_owned()), ..long };
        assert!(shown(StepName::Tests, &chosen).contains("PROPTEST_CASES=7"));
    }

    #[test]
    fn a_dirty_tree_packages_on_a_desk_only() {
        let desk = Setting { on_ci: false, ..setting() };
        assert!(shown(StepName::Package, &desk).contains("--allow-dirty"));
        assert!(!shown(StepName::Package, &setting()).contains("--allow-dirty"));
    }

    #[test]
    fn every_library_is_packaged_and_used_alone() {
        let shown = shown(StepName::Package, &setting());
        for library in LIBRARIES {
            assert!(shown.contains(&format!("-p {library}")), "{shown}");
            assert!(shown.contains(&format!("tar -xmzf /w/target/package/{library}-")), "{shown}");
            assert!(shown.contains(&format!("cd /w/target/outside/{library} && cargo check")), "{shown}");
        }
    }

    #[test]
    fn train_runs_what_the_tests_have_built() {
        let shown = shown(StepName::TrainSmoke, &setting());
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(
            lines[0],
            "cd /w && cargo build --workspace --features meshstep-bench/cuda --bins --tests"
        );
        assert!(lines[1].ends_with("meshstep-bench train --help"), "{shown}");
        assert!(lines[2].starts_with("cd /w && /w/target/debug/meshstep-bench"), "{shown}");
        assert!(lines[3].contains("--mesh tp=1 --mesh tp=2,cp=2,dp=2"), "{shown}");
        let long = self::shown(StepName::TrainSmoke, &Setting { long: true, ..setting() });
        assert!(long.contains("train --steps 12\n") && long.ends_with("train --compare"), "{long}");
    }

    #[test]
    fn only_keeps_the_usual_order_and_none_means_all() {
        let names = |only: &[StepName]| -> Vec<StepName> {
            chosen(only, &Setting { long: true, ..setting() }).iter().map(|step| step.name).collect()
        };
        assert_eq!(names(&[StepName::Tests, StepName::Fmt]), [StepName::Fmt, StepName::Tests]);
        assert_eq!(names(&[]), StepName::value_variants());
    }

    #[test]
    fn rerun_is_a_command_that_parses() {
        use clap::Parser;
        for &name in StepName::value_variants() {
            for long in [false, true] {
                let line = rerun(name, long);
                crate::cli::Cli::try_parse_from(line.split(' ').skip(1)).unwrap();
            }
        }
    }
}
