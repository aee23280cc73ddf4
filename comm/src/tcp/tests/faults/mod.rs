//! A thousand random schedules of faults: every rank ends with complete results or a typed error within the deadline and two
//! seconds, and a new generation works afterwards.
//!
//! `MESHSTEP_SEED=n` repeats the schedule of one seed.

mod ill;
mod processes;
mod program;
mod ranks;
mod schedule;
mod strangers;
mod verdict;
mod wires;

use meshstep_cases::{cases, seeds::seeds};
use schedule::Schedule;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;
use verdict::Report;

/// Schedules that run at the same time: most of their time is waits.
const AT_ONCE: usize = 8;
/// Longest time of a schedule that does not hang.
const HANGS: Duration = Duration::from_secs(90);

meshstep_cases::ten_parts!(part);

fn part(number: u64) {
    let mut left = seeds(number, cases(80, 1000));
    left.reverse();
    let (left, results) = (Mutex::new(left), Mutex::new(Vec::new()));
    let take = || left.lock().unwrap().pop();
    let work = || {
        while let Some(seed) = take() {
            let result = in_time(seed);
            results.lock().unwrap().push((seed, result));
        }
    };
    thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(work))));
    summarize(results.into_inner().unwrap());
}

fn run_one(seed: u64) -> Result<Report, String> {
    let schedule = Schedule::new(seed);
    if schedule::has_processes(seed) { processes::run(&schedule) } else { ranks::run(&schedule) }
}

/// Runs the schedule of a seed; a hang is a failure.
fn in_time(seed: u64) -> Result<Report, String> {
    let (done, is_done) = channel();
    let run = move || {
        let result = catch_unwind(AssertUnwindSafe(|| run_one(seed)));
        let _ = done.send(result.unwrap_or_else(|panic| Err(message(&*panic))));
    };
    // A thread that hangs is left to the end of the process.
    thread::spawn(run);
    match is_done.recv_timeout(HANGS) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => Err("it hangs".to_owned()),
        Err(RecvTimeoutError::Disconnected) => Err("its thread ended".to_owned()),
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    format!("it panicked: {}", text.unwrap_or_default())
}

fn summarize(results: Vec<(u64, Result<Report, String>)>) {
    let (mut faults, mut total, count) = (BTreeMap::new(), Report::default(), results.len());
    let mut failures = Vec::new();
    for (seed, result) in results {
        let schedule = Schedule::new(seed);
        for name in schedule.names() {
            *faults.entry(format!("{:?} {name}", schedule.way)).or_insert(0) += 1;
        }
        match result {
            Ok(report) => total.add(&report),
            Err(text) => failures.push(format!("seed {seed}: {text}\n  {schedule:?}")),
        }
    }
    println!("{count} schedules, {total:?}, faults {faults:?}");
    assert!(failures.is_empty(), "{} of {count} failed:\n{}", failures.len(), failures.join("\n"));
}
