//! Memory and time of the sharded optimizer on one GPU: AdamW on bf16 parameters with f32 masters and the shapes of GPT-2
//! XL, at stages 0 to 3, in one process and in two processes that share the GPU.
//!
//! Each case runs in separate processes. Its row has the bytes of each rank before and after construction, with gradients,
//! and after the step: as counted by the optimizer's meter, and as free memory reported by the driver. `ms` is the median
//! of a whole step: units are gathered twice, gradients copied, reduced and clipped, then the update, then the gathering of
//! parameters. If the bytes of an optimizer after construction differ from its plan, the row is an error with its figures.
//!
//! Prints a line for each case, and keeps `stages.json` in $OUT up to date after every case. A failed case, for example for
//! lack of memory, is a row with its error: the remaining cases still run, and the final exit status is a failure. Without
//! NCCL no case runs.
//!
//! `GPU_BENCH_MODEL` selects another model (tiny, gpt2, gpt2-medium, gpt2-large), `GPU_BENCH_STEPS` the steps after the
//! first (3), `GPU_BENCH_SECONDS` the time budget (none), `GPU_BENCH_ONLY` a substring of the cases' names. With
//! `GPU_BENCH_STANDIN=1` the program also runs on the stand-in for a driver, to test the program; it marks the results
//! accordingly.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

mod ranks;
mod settings;

use meshstep_bench_cases::budget::Budget;
use meshstep_bench_cases::gpu::stages::{self, Job, STAGES};
use meshstep_bench_cases::gpu::{Result, machine};
use meshstep_bench_cases::record::{Outcome, Record};
use meshstep_comm::nccl::{self, Unavailable, UniqueId};
use meshstep_tensor::cuda::{Device, Driver};
use serde_json::{Value, json};
use settings::Settings;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let is_rank = std::env::args().any(|arg| arg == ranks::RANK);
    match if is_rank { ranks::rank() } else { run() } {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A stage with a number of processes.
struct Case {
    stage: usize,
    ranks: usize,
}

impl Case {
    fn all() -> impl Iterator<Item = Case> {
        [1, 2].into_iter().flat_map(|ranks| (0..STAGES.len()).map(move |stage| Case { stage, ranks }))
    }

    fn name(&self) -> String {
        let Case { stage, ranks } = self;
        format!("stage {stage}, {ranks} process{}", if *ranks == 1 { "" } else { "es" })
    }

    fn head(&self) -> Value {
        json!({ "name": self.name(), "stage": self.stage, "processes": self.ranks })
    }

    fn measure(&self, settings: &Settings) -> Result<Value> {
        let id = UniqueId::new()?.as_bytes().to_vec();
        let job = |rank| Job {
            id: id.clone(),
            rank,
            ranks: self.ranks,
            stage: self.stage,
            rounds: settings.rounds,
            model: settings.model.clone(),
        };
        ranks::measure(&(0..self.ranks).map(job).collect::<Vec<_>>())
    }
}

fn run() -> Result<()> {
    let settings = Settings::read()?;
    let driver = match machine::driver()? {
        Ok(driver) => driver,
        Err(missing) => {
            println!("skipped: {missing}");
            return Ok(());
        }
    };
    let about = about(&settings, driver)?;
    println!("{}, {} with {} parameters", about["device"], settings.model, about["params"]);
    let cases: Vec<Case> = Case::all().filter(|case| settings.wants(&case.name())).collect();
    let mut record = Record::new(settings.path.clone(), &about, cases.iter().map(Case::head).collect())?;
    let missing = match nccl::probe() {
        Err(missing @ Unavailable::NoLibrary { .. }) => Some(missing.to_string()),
        // An unusable library is an error of each case.
        _ => None,
    };
    let mut budget = Budget::new(settings.seconds);
    for (idx, case) in cases.iter().enumerate() {
        let begun = Instant::now();
        let outcome = match missing.clone().or_else(|| budget.over()) {
            Some(reason) => Outcome::NotRun(reason),
            None => Outcome::of(|| case.measure(&settings)),
        };
        budget.took(begun.elapsed());
        print(record.set(idx, outcome)?);
    }
    record.about("after", machine::clocks())?;
    if let Some(missing) = missing {
        println!("skipped: {missing}");
    }
    match record.errors() {
        0 => Ok(()),
        errors => Err(format!("{errors} of {} cases failed", cases.len()).into()),
    }
}

/// Returns the record's head. Closes the device before a case begins, so that this process holds no device memory.
fn about(settings: &Settings, driver: &Driver) -> Result<Value> {
    let device = Device::open(0)?;
    let mut about = machine::about(&device, driver)?;
    about["memory"] = device.memory()?.into();
    about["model"] = settings.model.clone().into();
    let layout = stages::layout(&settings.model)?;
    about["params"] = layout.params().iter().map(|param| param.len()).sum::<usize>().into();
    about["precision"] = "bf16 parameters and gradients, f32 masters and moments".into();
    Ok(about)
}

fn print(row: &Value) {
    let name = row["name"].as_str().unwrap_or_default();
    if let Some(ms) = row["ms"].as_f64() {
        let points = ["after_construction", "with_gradients", "after_step"];
        let mib = |point: &str| {
            row["memory"][0][point]["live_total"].as_f64().unwrap_or(f64::NAN) / f64::from(1 << 20)
        };
        let [made, handed, stepped] = points.map(mib);
        println!(
            "{name:22} {ms:10.3} ms per step; rank 0 in MiB: {made:.1}, with gradients {handed:.1}, after the step {stepped:.1}"
        );
    }
    for (key, said) in [("error", "error"), ("not_run", "not run")] {
        if let Some(reason) = row[key].as_str() {
            println!("{name:22} {said}: {reason}");
        }
    }
}
