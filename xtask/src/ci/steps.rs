//! The steps of `ci` as data: which commands, in which order, under which setting. Nothing runs here.

use super::{candle, outside, standin};
use crate::cli::StepName;
use crate::cmd::Cmd;
use crate::workspace::LIBRARIES;
use clap::ValueEnum;
use std::fmt;
use std::path::PathBuf;

/// What the steps depend on.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    /// Full case counts.
    pub(crate) long: bool,
    /// Not on someone's desk: the tree must be clean.
    pub(crate) on_ci: bool,
    /// `cargo nextest` is installed.
    pub(crate) nextest: bool,
    /// PROPTEST_CASES as the caller has set it.
    pub(crate) cases: Option<String>,
}

#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) name: StepName,
    pub(crate) tasks: Vec<Task>,
}

/// One thing a step does.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    Run(Cmd),
    Tidy,
    /// The committed PTX against fresh.
    Ptx,
    /// Every flag of `train` that a document shows is in the help that this command prints.
    ShownFlags(Cmd),
    /// Makes this folder, empty.
    Empty(PathBuf),
    /// Compiles the CUDA kernels of the tree at `root` for the CPU.
    KernelsForCpu {
        root: PathBuf,
        into: PathBuf,
    },
    /// Writes a crate outside the workspace that does with candle what tensor's README shows.
    WriteRecipe {
        dir: PathBuf,
    },
    /// Writes a crate outside the workspace that depends on one library, as it was packaged.
    WriteOutside {
        dir: PathBuf,
        library: &'static str,
    },
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(cmd) => write!(f, "{cmd}"),
            Self::Tidy => f.write_str("cargo xtask tidy"),
            Self::Ptx => f.write_str("cargo xtask kernels --check"),
            Self::ShownFlags(help) => write!(f, "look for the documents' flags in the answer to: {help}"),
            Self::Empty(dir) => write!(f, "empty {}", dir.display()),
            Self::KernelsForCpu { into, .. } => {
                write!(f, "compile the kernels for the CPU into {}", into.display())
            }
            Self::WriteRecipe { dir } => {
                write!(f, "write the crate that tensor's README shows into {}", dir.display())
            }
            Self::WriteOutside { dir, library } => {
                write!(f, "write a crate using {library} alone into {}", dir.display())
            }
        }
    }
}

/// The steps named in `only`, or all of them; always in the order of [`StepName`].
pub(crate) fn chosen(only: &[StepName], setting: &Setting) -> Vec<Step> {
    let short = |name: &StepName| setting.long || *name != StepName::Candle;
    let wanted = |name: &&StepName| only.contains(name) || (only.is_empty() && short(name));
    StepName::value_variants().iter().filter(wanted).map(|&name| step(name, setting)).collect()
}

/// The name of a step as `--only` takes it.
pub(crate) fn id(name: StepName) -> String {
    name.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// How to run one step again.
pub(crate) fn rerun(name: StepName, long: bool) -> String {
    format!("cargo xtask ci {}--only {}", if long { "--long " } else { "" }, id(name))
}

fn step(name: StepName, setting: &Setting) -> Step {
    let cargo = |line: &str| Cmd::cargo(line).dir(&setting.root);
    let tasks = match name {
        StepName::Fmt => vec![Task::Run(cargo("fmt --all --check"))],
        StepName::Tidy => vec![Task::Tidy],
        StepName::Clippy => {
            // And the libraries as whoever asks for no feature gets them.
            let plain: String = LIBRARIES.iter().map(|library| format!("-p {library} ")).collect();
            ["--workspace --all-targets --all-features", plain.trim_end()]
                .map(|what| Task::Run(cargo(&format!("clippy {what} -- -D warnings"))))
                .into()
        }
        StepName::Kernels => vec![Task::Ptx],
        StepName::Rustdoc => {
            vec![Task::Run(
                cargo("doc --no-deps --workspace --all-features").env("RUSTDOCFLAGS", "-D warnings"),
            )]
        }
        // Not with all features: `shuttle` replaces comm's threads by a scheduler that only its own tests start.
        // The tests of CUDA kernels compile them for the CPU.
        StepName::Tests => vec![with(test(ALL, setting), "REQUIRE_SIMT", "1")],
        StepName::Standin => standin::tasks(setting),
        // Chosen from the whole workspace, so that what the tests were built with is used again, not rebuilt.
        StepName::Shuttle => {
            vec![test(&format!("{ALL},meshstep-comm/shuttle --test shuttle"), setting)]
        }
        StepName::Doctests => vec![Task::Run(counted(cargo(&format!("test --doc {ALL}")), setting))],
        StepName::TrainSmoke => train_smoke(setting),
        StepName::Package => package(setting),
        StepName::Candle => candle::tasks(setting),
    };
    Step { name, tasks }
}

/// What tests are chosen from, with the same features for all, so that nothing is built twice.
const ALL: &str = "--workspace --features meshstep-shard/checkpoint,meshstep-parallel3d/checkpoint";

/// Tests under nextest, which runs each in a process of its own, or else under `cargo test`.
pub(super) fn test(what: &str, setting: &Setting) -> Task {
    let runner = if setting.nextest { "nextest run" } else { "test" };
    // `cargo test` would run the doctests too, which have a step of their own.
    let targets = if setting.nextest || what.contains("--test") { "" } else { "--tests" };
    let cmd = Cmd::cargo(&format!("{runner} --no-fail-fast {what} {targets}"));
    Task::Run(counted(cmd.dir(&setting.root), setting))
}

/// The task under one more variable.
fn with(task: Task, name: &str, value: &str) -> Task {
    match task {
        Task::Run(cmd) => Task::Run(cmd.env(name, value)),
        other => other,
    }
}

/// The case counts: reduced ones are the tests' own defaults, the full ones they take from MESHSTEP_LONG.
fn counted(cmd: Cmd, setting: &Setting) -> Cmd {
    if !setting.long {
        return cmd;
    }
    // For properties that state no count of their own; the caller's choice wins.
    let cases = setting.cases.as_deref().unwrap_or("4096");
    cmd.env("MESHSTEP_LONG", "1").env("PROPTEST_CASES", cases)
}

/// Built together with the tests: `cargo run -p meshstep-bench` would choose fewer features for what they share, and
/// compile candle and sixty others a second time.
fn train_smoke(setting: &Setting) -> Vec<Task> {
    let build = Cmd::cargo(&format!("build {ALL} --bins --tests")).dir(&setting.root);
    let program = format!("meshstep-bench{}", std::env::consts::EXE_SUFFIX);
    let program = setting.target.join("debug").join(program);
    let bench = |line: &str| Cmd::built(&program, line).dir(&setting.root);
    // On one rank, and on eight: tensors, sequences and batches cut in two each.
    let short = "train --mesh tp=1 --mesh tp=2,cp=2,dp=2 --steps 6";
    let meshes = if setting.long { "train --compare" } else { short };
    vec![
        Task::Run(build),
        Task::ShownFlags(bench("train --help")),
        Task::Run(bench("train --steps 12")),
        Task::Run(bench(meshes)),
    ]
}

/// Packages every library and builds a crate on each package.
///
/// Cargo's own verification is not asked for: it keeps what it unpacks in the user's cargo home by name, version and path,
/// so that on a machine that has run this before it would verify against what the libraries once were.
fn package(setting: &Setting) -> Vec<Task> {
    // All in one invocation, so that each finds the others though none is published.
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
    // One target folder for all four: what they share is built once.
    let target = folder.join("target");
    let build = Cmd::cargo("build --target-dir").arg(&target.to_string_lossy()).dir(&dir);
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
            nextest: true,
            cases: None,
        }
    }

    fn shown(name: StepName, setting: &Setting) -> String {
        let tasks: Vec<String> = step(name, setting).tasks.iter().map(Task::to_string).collect();
        tasks.join("\n")
    }

    #[test]
    fn tests_fall_back_to_cargo_test_without_doctests() {
        let cargo_test = Setting { nextest: false, ..setting() };
        assert_eq!(
            shown(StepName::Tests, &setting()),
            "cd /w && REQUIRE_SIMT=1 cargo nextest run --no-fail-fast --workspace --features meshstep-shard/checkpoint,meshstep-parallel3d/checkpoint"
        );
        assert_eq!(
            shown(StepName::Tests, &cargo_test),
            "cd /w && REQUIRE_SIMT=1 cargo test --no-fail-fast --workspace --features meshstep-shard/checkpoint,meshstep-parallel3d/checkpoint --tests"
        );
        assert_eq!(
            shown(StepName::Shuttle, &cargo_test),
            "cd /w && cargo test --no-fail-fast --workspace --features meshstep-shard/checkpoint,meshstep-parallel3d/checkpoint,meshstep-comm/shuttle --test shuttle"
        );
    }

    #[test]
    fn the_stand_in_is_in_the_path_of_its_own_tests_only() {
        let shown = shown(StepName::Standin, &setting());
        let with = "/w/target/standin MESHSTEP_STANDIN=1 \
                    MESHSTEP_STANDIN_KERNELS=/w/target/standin/kernels REQUIRE_GPU=1 cargo";
        let on_them: Vec<&str> = shown.lines().filter(|line| line.contains(" cargo ")).collect();
        assert!(on_them.len() > 2 && on_them.iter().all(|line| line.contains(with)), "{shown}");
        let others = StepName::value_variants().iter().filter(|&&name| name != StepName::Standin);
        assert!(others.map(|&name| self::shown(name, &setting())).all(|shown| !shown.contains("STANDIN")));
        assert!(shown.contains("-o /w/target/standin/libcuda.so.1"), "{shown}");
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
            assert!(shown(name, &long).contains("MESHSTEP_LONG=1 PROPTEST_CASES=4096 "));
            assert!(!shown(name, &setting()).contains("MESHSTEP_LONG"));
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
            assert!(shown.contains(&format!("cd /w/target/outside/{library} && cargo build")), "{shown}");
        }
    }

    #[test]
    fn train_runs_what_the_tests_have_built() {
        let shown = shown(StepName::TrainSmoke, &setting());
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(
            lines[0],
            "cd /w && cargo build --workspace --features meshstep-shard/checkpoint,meshstep-parallel3d/checkpoint --bins --tests"
        );
        assert!(lines[1].ends_with("meshstep-bench train --help"), "{shown}");
        assert!(lines[2].starts_with("cd /w && /w/target/debug/meshstep-bench"), "{shown}");
        assert!(lines[3].contains("--mesh tp=1 --mesh tp=2,cp=2,dp=2"), "{shown}");
        let long = self::shown(StepName::TrainSmoke, &Setting { long: true, ..setting() });
        assert!(long.ends_with("train --compare"), "{long}");
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
