//! Ranks as processes of this program: each reads its job from a line, and answers with its figures or its error.

use meshstep_bench_cases::gpu::stages::{self, Job, Measured};
use meshstep_bench_cases::gpu::{Result, median};
use meshstep_bench_cases::peers::Program;
use meshstep_bench_cases::record::Outcome;
use serde_json::{Value, json};
use std::process::Command;
use std::time::Duration;

/// Command-line argument of a rank's process.
pub(crate) const RANK: &str = "--rank";

/// Time limit of a rank: a case of two ranks exchanges gigabytes over sockets.
const PATIENCE: Duration = Duration::from_secs(100);

/// Figures of a rank, or its error.
type Answer = std::result::Result<Measured, String>;

/// Main function of a rank's process.
pub(crate) fn rank() -> Result<()> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let job: Job = serde_json::from_str(&line)?;
    let told =
        match Outcome::of(|| stages::run(&job).and_then(|measured| Ok(serde_json::to_value(measured)?))) {
            Outcome::Measured(measured) => json!({ "measured": measured }),
            Outcome::Failed(error) | Outcome::NotRun(error) => json!({ "error": error }),
        };
    println!("{told}");
    Ok(())
}

/// Runs a case, with a job for each rank, and returns its figures.
pub(crate) fn measure(jobs: &[Job]) -> Result<Value> {
    let mut programs = jobs.iter().map(start).collect::<Result<Vec<_>>>()?;
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let ask = |(program, job)| scope.spawn(move || ask(program, job));
        let asked: Vec<_> = programs.iter_mut().zip(jobs).map(ask).collect();
        let answer = |asked: std::thread::ScopedJoinHandle<'_, _>| {
            asked.join().unwrap_or_else(|_| Err("the thread that queried the rank panicked".to_owned()))
        };
        asked.into_iter().map(answer).collect()
    });
    let failed = |(rank, answer): (usize, &Answer)| Some(format!("rank {rank}: {}", answer.as_ref().err()?));
    let errors: Vec<String> = answers.iter().enumerate().filter_map(failed).collect();
    if !errors.is_empty() {
        return Err(errors.join("; ").into());
    }
    let ranks: Vec<Measured> = answers.into_iter().flatten().collect();
    let mut figures = figures(&ranks);
    if let Some(error) = unplanned(jobs, &ranks)? {
        figures["error"] = error.into();
    }
    Ok(figures)
}

/// Starts a rank's process. NCCL allows ranks to share a GPU only if they name different hosts.
fn start(job: &Job) -> Result<Program> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(RANK).env("NCCL_HOSTID", job.rank.to_string()).env("NCCL_SOCKET_IFNAME", "lo");
    // NCCL would print its messages on the standard output, which carries the answer.
    command.env_remove("NCCL_DEBUG");
    let mut program = Program::start(&format!("rank {}", job.rank), &mut command)?;
    program.patience = PATIENCE;
    Ok(program)
}

fn ask(program: &mut Program, job: &Job) -> Answer {
    let job = serde_json::to_string(job).map_err(|error| error.to_string())?;
    let answer =
        program.ask(&job).map_err(|_| format!("its process ended, or took more than {PATIENCE:?}"))?;
    let unreadable = |error| format!("the answer {answer:?} is not valid: {error}");
    let told: Value = serde_json::from_str(&answer).map_err(unreadable)?;
    match told["error"].as_str() {
        Some(error) => Err(error.to_owned()),
        None => serde_json::from_value(told["measured"].clone()).map_err(unreadable),
    }
}

/// Returns the times of the slowest rank, and each rank's memory.
fn figures(ranks: &[Measured]) -> Value {
    let slowest = |of: fn(&Measured) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
    json!({
        "ms": slowest(|rank| median(&rank.steps)) * 1e3,
        "first_step_ms": slowest(|rank| rank.first) * 1e3,
        "steps": ranks.iter().map(|rank| rank.steps.len()).min(),
        "memory": ranks.iter().map(|rank| &rank.memory).collect::<Vec<_>>(),
    })
}

/// Describes the first difference between an optimizer's memory after construction and its plan.
fn unplanned(jobs: &[Job], ranks: &[Measured]) -> Result<Option<String>> {
    for (job, measured) in jobs.iter().zip(ranks) {
        for (category, planned) in job.planned()? {
            let live = &measured.memory["after_construction"]["live"][category.to_string()];
            if *live != planned {
                return Ok(Some(format!("rank {}: {live} bytes of {category}, planned {planned}", job.rank)));
            }
        }
    }
    Ok(None)
}
