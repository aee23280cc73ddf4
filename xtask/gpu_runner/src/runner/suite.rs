//! Runs a test program test by test. A test that hangs or crashes ends its process; another process runs the remaining
//! tests.

use super::child::{End, Launch, Wish};
use super::clock::{Clock, Stop};
use super::libtest::{Results, listed};
use super::report::{Row, Verdict};
use std::time::{Duration, Instant};

/// Parts of the names of tests that need a GPU: their modules.
const ON_GPU: [&str; 2] = ["cuda::", "nccl::"];

/// Time limit for listing a program's tests.
const LIST_LIMIT: Duration = Duration::from_secs(20);

/// Time between two updates of the record while a program runs.
const RECORDED: Duration = Duration::from_secs(1);

/// A test program and the settings of its run.
pub(crate) struct Suite<'a> {
    /// Returns the launch of a process of the program with these arguments.
    pub(crate) launch: &'a dyn Fn(&[String]) -> Launch,
    /// Launch that lists the tests.
    pub(crate) list: Launch,
    /// Selects tests from those that need a GPU.
    pub(crate) chosen: &'a dyn Fn(Vec<String>) -> Vec<String>,
    /// Time limits of the program and of each test.
    pub(crate) limits: [Duration; 2],
    pub(crate) clock: &'a Clock,
}

/// Outcome of one process of the program.
struct Round {
    end: End,
    results: Results,
}

impl Suite<'_> {
    /// Runs every selected test that needs a GPU, and fills the row. `record` saves the row while tests run.
    pub(crate) fn run(&self, row: &mut Row, record: &mut dyn FnMut(&Row)) -> anyhow::Result<()> {
        let started = Instant::now();
        let Some(tests) = self.tests(row)? else { return Ok(()) };
        let mut rest = tests;
        row.not_run = rest.len();
        row.verdict = Verdict::Running;
        while !rest.is_empty() {
            let left = self.limits[0].saturating_sub(started.elapsed());
            let Round { end, results } = self.round(&rest, left, &mut |results| {
                let mut now = row.clone();
                count(&mut now, results);
                now.seconds = started.elapsed().as_secs_f64();
                record(&now);
            })?;
            count(row, &results);
            rest = results.rest();
            if !self.judge(row, &end, &results) {
                break;
            }
        }
        row.verdict = verdict(row);
        Ok(())
    }

    /// Returns the tests to run, or `None` if listing the tests already decided the row's verdict.
    fn tests(&self, row: &mut Row) -> anyhow::Result<Option<Vec<String>>> {
        let mut text = Vec::new();
        let end = self.list.run(LIST_LIMIT.min(self.limits[0]), self.clock, |piece| {
            text.extend_from_slice(piece);
            Wish::GoOn
        })?;
        set_end(row, &end);
        let list = match end {
            End::Stop(stop) => {
                row.verdict = stopped(stop);
                return Ok(None);
            }
            End::Exit(0) => listed(&String::from_utf8_lossy(&text)),
            _ => None,
        };
        let on_gpu = |name: &String| ON_GPU.iter().any(|module| name.contains(module));
        let tests = list.map(|list| (self.chosen)(list.into_iter().filter(on_gpu).collect()));
        row.verdict = if tests.is_some() { Verdict::RanNoTest } else { Verdict::NoTestList };
        Ok(tests.filter(|tests| !tests.is_empty()))
    }

    /// Runs these tests in one process, until all are done, a test hangs or a test ends the process.
    fn round(
        &self,
        tests: &[String],
        limit: Duration,
        record: &mut dyn FnMut(&Results),
    ) -> anyhow::Result<Round> {
        let mut results = Results::of(tests);
        let (mut since, mut recorded, mut events) = (Instant::now(), Instant::now(), 0);
        let mut args: Vec<String> =
            ["--test-threads", "1", "--nocapture", "--exact"].map(str::to_owned).into();
        args.extend_from_slice(tests);
        let end = (self.launch)(&args).run(limit, self.clock, |piece| {
            results.read(piece);
            if results.events != events {
                (since, events) = (Instant::now(), results.events);
                if recorded.elapsed() >= RECORDED {
                    recorded = Instant::now();
                    record(&results);
                }
            }
            if since.elapsed() >= self.limits[1] { Wish::End } else { Wish::GoOn }
        })?;
        Ok(Round { end, results })
    }

    /// Records how a process ended. Returns true if another process can run the remaining tests.
    fn judge(&self, row: &mut Row, end: &End, results: &Results) -> bool {
        set_end(row, end);
        match end {
            End::Stop(stop) => row.verdict = stopped(*stop),
            End::Limit => row.verdict = Verdict::OverLimit,
            End::NotStarted => row.verdict = Verdict::NotStarted("see its log".to_owned()),
            End::Ended => match &results.current {
                Some(test) => row.hung.push(test.clone()),
                None => row.verdict = Verdict::Hung,
            },
            End::Exit(_) | End::Signal(_) => match &results.current {
                Some(test) => row.crashed.push(test.clone()),
                None if !ended_well(end, results) => row.verdict = Verdict::Crashed,
                // A program that exits cleanly without running the requested tests would do so again.
                None => return false,
            },
        }
        row.not_run -= usize::from(results.current.is_some() && row.verdict == Verdict::Running);
        row.verdict == Verdict::Running
    }
}

/// Returns true if the process ended as libtest does: with status 0, or with 101 after a failed test.
fn ended_well(end: &End, results: &Results) -> bool {
    match end {
        End::Exit(0) => true,
        End::Exit(101) => results.finished && !results.failed.is_empty(),
        _ => false,
    }
}

/// Adds the results of a process to its row.
fn count(row: &mut Row, results: &Results) {
    row.passed += results.passed.len();
    row.failed.extend(results.failed.iter().cloned());
    row.skipped += results.skipped;
    row.not_run = results.rest().len() + usize::from(results.current.is_some());
}

/// Returns the verdict over all processes of the program.
fn verdict(row: &Row) -> Verdict {
    match &row.verdict {
        Verdict::Running if !row.crashed.is_empty() => Verdict::Crashed,
        Verdict::Running if !row.hung.is_empty() => Verdict::Hung,
        Verdict::Running if !row.failed.is_empty() => Verdict::Failed,
        Verdict::Running if row.passed == 0 && row.skipped == 0 => Verdict::RanNoTest,
        Verdict::Running if row.not_run > 0 => Verdict::Failed,
        Verdict::Running if row.passed == 0 => Verdict::Skipped("every test skipped itself".to_owned()),
        Verdict::Running => Verdict::Passed,
        other => other.clone(),
    }
}

pub(crate) fn stopped(stop: Stop) -> Verdict {
    match stop {
        Stop::Deadline => Verdict::AtDeadline,
        Stop::Signal => Verdict::BySignal,
    }
}

/// Stores the exit status or the signal of the program's last process.
pub(crate) fn set_end(row: &mut Row, end: &End) {
    (row.exit, row.signal) = match end {
        End::Exit(code) => (Some(*code), None),
        End::Signal(signal) => (None, Some(*signal)),
        _ => (None, None),
    };
}
