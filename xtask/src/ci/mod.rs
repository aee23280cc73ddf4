//! `ci`: runs the steps in order, names each with its time, and stops at the first that fails.

mod candle;
mod outside;
mod report;
mod standin;
mod steps;

use crate::cli::{CiArgs, KernelsArgs, StepName};
use crate::cmd::Cmd;
use crate::kernels;
use crate::tidy;
use crate::workspace::Workspace;
use anyhow::{Context, ensure};
use report::{Report, seconds};
use std::fs;
use std::process::ExitCode;
use std::time::Instant;
use steps::{Setting, Step, Task};

pub(crate) fn run(args: &CiArgs) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::find()?;
    let setting = setting(args, &workspace)?;
    let chosen = steps::chosen(&args.only, &setting);
    if args.list {
        print!("{}", report::list(&chosen));
        return Ok(ExitCode::SUCCESS);
    }
    let (report, failure) = run_steps(&chosen, &workspace);
    print!("\n{report}");
    let Some((name, error)) = failure else {
        println!("every step passed");
        return Ok(ExitCode::SUCCESS);
    };
    println!("step {} FAILED: {error:#}", steps::id(name));
    println!("again, alone: {}", steps::rerun(name, args.long));
    Ok(ExitCode::FAILURE)
}

fn setting(args: &CiArgs, workspace: &Workspace) -> anyhow::Result<Setting> {
    Ok(Setting {
        root: workspace.root.clone(),
        target: workspace.target.clone(),
        long: args.long,
        on_ci: std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false"),
        nextest: Cmd::cargo("nextest --version").output()?.is_some(),
        cases: std::env::var("PROPTEST_CASES").ok(),
    })
}

type Failure = (StepName, anyhow::Error);

fn run_steps(chosen: &[Step], workspace: &Workspace) -> (Report, Option<Failure>) {
    let mut report = Report::start();
    for (idx, step) in chosen.iter().enumerate() {
        let name = steps::id(step.name);
        println!("\n=== {} of {}: {name}", idx + 1, chosen.len());
        let start = Instant::now();
        let result = step.tasks.iter().try_for_each(|task| run_task(task, workspace));
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

fn run_task(task: &Task, workspace: &Workspace) -> anyhow::Result<()> {
    println!("--- {task}");
    match task {
        Task::Tidy => tidy::run(workspace),
        Task::Ptx => kernels::run(&KernelsArgs { check: true, ..KernelsArgs::default() }, workspace),
        Task::ShownFlags(help) => {
            let help_text = help.output()?.with_context(|| format!("no answer from: {help}"))?;
            tidy::check_flags(workspace, &help_text)
        }
        Task::Empty(dir) => {
            // There need not be one.
            let _ = fs::remove_dir_all(dir);
            fs::create_dir_all(dir).with_context(|| format!("cannot {task}"))
        }
        Task::KernelsForCpu { root, into } => {
            standin::kernels(root, into).with_context(|| format!("cannot {task}"))
        }
        Task::WriteRecipe { dir } => candle::write(dir, workspace).with_context(|| format!("cannot {task}")),
        Task::WriteOutside { dir, library } => {
            outside::write(dir, library, workspace).with_context(|| format!("cannot {task}"))
        }
        Task::Run(cmd) => {
            let status = cmd.run_unattended()?;
            ensure!(status.success(), "{status}\ncommand:      {cmd}");
            Ok(())
        }
    }
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
            // The one program that fails without a word.
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
