//! `ci`: runs the steps in order, prints each step's name and time, and stops at the first failure.

mod apt;
mod book;
mod candle;
mod junit;
mod mpi;
mod nccl_abi;
mod packages;
mod pages;
pub(crate) mod report;
mod standin;
pub(crate) mod steps;
pub(crate) mod task;
mod train;
mod watched;

use crate::cli::{CiArgs, KernelsArgs, StepName, TidyArgs};
use crate::cmd::Cmd;
use crate::kernels;
use crate::tidy;
use crate::workspace::Workspace;
use anyhow::Context;
use report::{Report, seconds};
use std::fs;
use std::process::ExitCode;
use std::time::Instant;
use task::{Step, Task};

pub(crate) fn run(args: &CiArgs) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::find()?;
    let setting = steps::setting(&workspace, args.long);
    let chosen = steps::chosen(&args.only, &setting);
    if args.list {
        print!("{}", report::list(&chosen));
        return Ok(ExitCode::SUCCESS);
    }
    let (report, failure) = run_steps(&chosen, &workspace);
    Ok(verdict(&report, failure, |name| steps::rerun(name, args.long)))
}

/// Prints the tables and the verdict of a run; `again` returns the command that repeats one step.
pub(crate) fn verdict(
    report: &Report,
    failure: Option<Failure>,
    again: impl Fn(StepName) -> String,
) -> ExitCode {
    print!("\n{report}");
    let Some((name, error)) = failure else {
        println!("every step passed");
        return ExitCode::SUCCESS;
    };
    println!("step {} FAILED: {error:#}", steps::id(name));
    println!("to repeat this step: {}", again(name));
    ExitCode::FAILURE
}

pub(crate) type Failure = (StepName, anyhow::Error);

/// Runs the steps in order, and stops at the first that fails.
pub(crate) fn run_steps(chosen: &[Step], workspace: &Workspace) -> (Report, Option<Failure>) {
    let mut report = Report::start();
    for (idx, step) in chosen.iter().enumerate() {
        let name = steps::id(step.name);
        println!("\n=== {} of {}: {name}", idx + 1, chosen.len());
        let start = Instant::now();
        let result = step.tasks.iter().try_for_each(|task| run_task(task, workspace, &mut report));
        let took = start.elapsed();
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        println!("=== {name}: {verdict} after {}", seconds(took));
        report.push(&name, verdict, took);
        if let Err(error) = result {
            return (report, Some((step.name, error)));
        }
    }
    (report, None)
}

fn run_task(task: &Task, workspace: &Workspace, report: &mut Report) -> anyhow::Result<()> {
    println!("--- {task}");
    let start = Instant::now();
    let result = match task {
        Task::Tidy => tidy::run(&TidyArgs::default(), workspace),
        Task::Ptx { chip } => {
            let chip = chip.map(str::to_owned);
            kernels::run(&KernelsArgs { check: true, chip, ..KernelsArgs::default() }, workspace)
        }
        Task::ShownFlags(help) => {
            let help_text = help.output()?.with_context(|| format!("the command failed: {help}"))?;
            tidy::check_flags(workspace, &help_text)
        }
        Task::Empty(dir) => {
            // The folder may not exist.
            let _ = fs::remove_dir_all(dir);
            fs::create_dir_all(dir).with_context(|| format!("cannot {task}"))
        }
        Task::Standins { root, into } => standin::build(root, into).with_context(|| format!("cannot {task}")),
        Task::WriteRecipe { dir } => candle::write(dir, workspace).with_context(|| format!("cannot {task}")),
        Task::PackagesWorkspace => {
            packages::write_workspace(workspace).with_context(|| format!("cannot {task}"))
        }
        Task::PackageSizes => packages::print_sizes(&workspace.target),
        Task::Nextest => nextest(),
        Task::Book(task) => task.run(),
        Task::Pages(task) => task.run(),
        Task::NcclAbi(check) => check.run(),
        Task::Watched(watched) => watched.run(),
        Task::MpiPackages(library) => library.install(),
        Task::Run(cmd) => cmd.succeed(),
        Task::Test(cmd) => test(cmd, workspace, report),
    };
    report.push_task(task.to_string(), start.elapsed());
    result
}

/// Version to install if cargo-nextest is missing.
const NEXTEST: &str = "0.9.143";

fn nextest() -> anyhow::Result<()> {
    if Cmd::cargo("nextest --version").output()?.is_some() {
        return Ok(());
    }
    println!("cargo-nextest is not installed; building {NEXTEST}");
    Cmd::cargo(&format!("install cargo-nextest --locked --version {NEXTEST}")).succeed()
}

/// Runs nextest and records the time of each test, also after a failed run.
fn test(cmd: &Cmd, workspace: &Workspace, report: &mut Report) -> anyhow::Result<()> {
    let path = junit::path(&workspace.target);
    // Remove the report of an earlier run, so that it is not read as this run's.
    let _ = fs::remove_file(&path);
    let result = cmd.succeed();
    match fs::read_to_string(&path) {
        Ok(text) => report.push_tests(junit::times(&text)?),
        Err(error) if result.is_ok() => {
            return Err(error).with_context(|| format!("cannot read nextest's report {}", path.display()));
        }
        // nextest ended before any test ran, for example after a compile error.
        Err(_) => {}
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(name: StepName, line: &str) -> Step {
        Step { name, tasks: vec![Task::Run(Cmd::cargo(line))] }
    }

    #[cfg(unix)]
    #[test]
    fn stops_at_the_first_failure_and_names_its_command() {
        let workspace = Workspace::find().unwrap();
        let steps = [
            step(StepName::Fmt, "--version"),
            // `false` fails without output.
            Step { name: StepName::Clippy, tasks: vec![Task::Run(Cmd::built("false", "now"))] },
            step(StepName::Tests, "--version"),
        ];
        let (report, failure) = run_steps(&steps, &workspace);
        let (name, error) = failure.unwrap();
        assert_eq!(name, StepName::Clippy);
        assert!(error.to_string().ends_with("command:      false now"), "{error}");
        let table = report.to_string();
        assert!(table.contains("fmt") && table.contains("clippy") && !table.contains("tests"), "{table}");
    }

    #[test]
    fn without_a_failure_every_step_is_timed() {
        let workspace = Workspace::find().unwrap();
        let (report, failure) = run_steps(&[step(StepName::Fmt, "--version")], &workspace);
        assert!(failure.is_none());
        assert!(report.to_string().contains("total"));
    }
}
