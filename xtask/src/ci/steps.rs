//! Steps of `ci` as data: their commands, their order, and the settings they depend on. Nothing runs here.

use super::task::{ALL, ON_GPU, Setting, Step, Task, test, with};
use super::{book, candle, mpi, nccl_abi, packages, pages, standin, train, watched};
use crate::cli::StepName;
use crate::cmd::Cmd;
use crate::workspace::{Workspace, published};
use clap::ValueEnum;

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

/// Steps that only a long run has, and runs that name them.
const LONG: [StepName; 7] = [
    StepName::Deny,
    StepName::Candle,
    StepName::Tsan,
    StepName::Asan,
    StepName::Miri,
    StepName::Msrv,
    StepName::Reports,
];

/// Returns the steps named in `only`, or all of them; always in the order of [`StepName`].
pub(crate) fn chosen(only: &[StepName], setting: &Setting) -> Vec<Step> {
    let short = |name: &StepName| setting.long || !LONG.contains(name);
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
                published().chain(["meshstep-bench"]).map(|name| format!("-p {name} ")).collect();
            let clippy = |what: String| cargo(&format!("clippy {what} -- -D warnings"));
            let mut tasks: Vec<Task> =
                [format!("{ALL} --all-targets"), shuttle(), plain.trim_end().to_owned()]
                    .map(|what| Task::Run(clippy(what)))
                    .into();
            if setting.long {
                // Burn on GPUs: three minutes on two cores. With DOCS_RS its build fetches no LLVM, which only linking needs.
                let burn = clippy("-p meshstep-burn --all-targets --features cuda,checkpoint".to_owned());
                tasks.push(Task::Run(burn.env("DOCS_RS", "1")));
            }
            tasks
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
        StepName::Package => packages::tasks(setting),
        StepName::Deny => deny(setting),
        StepName::Candle => candle::tasks(setting),
        StepName::Tsan => watched::tsan(setting),
        StepName::Asan => watched::asan(setting),
        StepName::Miri => watched::miri(setting),
        StepName::Msrv => watched::msrv(setting),
        StepName::Reports => pages::tasks(setting),
    };
    Step { name, tasks }
}

/// Returns the arguments for the scheduler's tests. They select from the whole workspace, to reuse the builds of the other
/// tests.
fn shuttle() -> String {
    format!("{ALL},meshstep-comm/shuttle --test shuttle")
}

/// Checks licences, duplicates and sources of the dependencies with cargo-deny, which is installed into the target folder. Advisories are
/// not checked: they need a database, which the workflow's long run downloads.
fn deny(setting: &Setting) -> Vec<Task> {
    let tools = setting.target.join("tools");
    let install = Cmd::cargo("install --locked --quiet cargo-deny --version =0.20.2 --root")
        .arg(&tools.to_string_lossy());
    let check = Cmd::built(tools.join("bin/cargo-deny"), "--offline check licenses bans sources");
    vec![Task::Run(install), Task::Run(check.dir(&setting.root))]
}

#[cfg(test)]
mod tests {
    use super::super::task::FEATURES;
    use super::*;
    use std::path::PathBuf;

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
    fn a_long_run_lints_burn_on_gpus_without_llvm() {
        let burn =
            "DOCS_RS=1 cargo clippy -p meshstep-burn --all-targets --features cuda,checkpoint -- -D warnings";
        let long = Setting { long: true, ..setting() };
        let of = |setting| shown(StepName::Clippy, setting).lines().any(|line| line.ends_with(burn));
        assert_eq!((of(&setting()), of(&long)), (false, true));
    }

    #[test]
    fn every_feature_of_a_subset_is_one_of_all() {
        for (package, feature) in FEATURES {
            assert!(ALL.split([' ', ',']).any(|given| given == format!("{package}/{feature}")), "{ALL}");
        }
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
    fn reports_are_written_before_they_are_looked_at_in_long_runs() {
        let long = Setting { long: true, ..setting() };
        let has = |setting: &Setting| chosen(&[], setting).iter().any(|step| step.name == StepName::Reports);
        assert!(has(&long) && !has(&setting()));
        let shown = shown(StepName::Reports, &long);
        for report in ["bench/report.html", "local/local.html", "chaos/local.html"] {
            let folder = report.split('/').next().unwrap();
            let written = shown.find(&format!("--out /w/target/reports/{folder}")).unwrap();
            assert!(written < shown.find(&format!("check /w/target/reports/{report}")).unwrap(), "{shown}");
        }
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
    fn every_package_is_packed_and_built_alone() {
        let shown = shown(StepName::Package, &setting());
        for package in published() {
            assert!(shown.contains(&format!("-p {package}")), "{shown}");
            assert!(shown.contains(&format!("tar -xmzf /w/target/package/{package}-")), "{shown}");
            assert!(
                shown.contains(&format!("cd /w/target/packages && cargo check -p {package} ")),
                "{shown}"
            );
        }
    }

    #[test]
    fn train_runs_what_the_tests_have_built() {
        let shown = shown(StepName::TrainSmoke, &setting());
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[0], format!("cd /w && cargo build {ALL} --bins --tests"));
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
