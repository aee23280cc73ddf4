//! One run: every step of a mode in turn; the record is rewritten before and after each step.

use super::child::{End, Launch, Wish};
use super::clock::{Clock, Stop};
use super::logs::{Scratch, tail};
use super::output::{complain, say};
use super::plan::{Mode, Step, Work, installed};
use super::report::{Ended, Kind, Report, Row, Verdict, remove_parts};
use super::settings::{Settings, duration};
use super::suite::{Suite, set_end, stopped};
use super::{machine, nccl};
use anyhow::Context;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Lines shown of a failed program's errors, and of a benchmark's tables.
const SHOWN: [usize; 2] = [20, 200];

/// Result files that every run replaces.
const REPLACED: [&str; 2] = ["results.json", "logs.tar"];

/// Result files of the benchmarks on the GPU and on the CPU.
const MEASURED: [&str; 4] = ["smoke.json", "gpu-bench.json", "torch-bench.json", "stages.json"];
const MEASURED_ON_CPU: [&str; 2] = ["cpu-bench.json", "cpu-torch.json"];

/// Factor by which the time limit of a test grows under a sanitizer.
const SANITIZED: u32 = 3;

struct Run {
    bundle: PathBuf,
    settings: Settings,
    clock: Clock,
    scratch: Scratch,
    report: Report,
    /// Environment of the NCCL tests, once it was searched for. The inner `None` means that there is no NCCL.
    nccl: Option<Option<Vec<(String, OsString)>>>,
}

/// Runs a mode and returns true on success.
pub(crate) fn run(mode: Mode, settings: Settings) -> anyhow::Result<bool> {
    let clock = Clock::start(duration(settings.limits.deadline))?;
    let bundle = std::env::current_exe().context("cannot find the runner's own program")?;
    let bundle = bundle.parent().context("the runner lies in no folder")?.to_owned();
    let scratch = Scratch::new()?;
    let steps = mode.steps(&bundle, [&settings.out, scratch.folder()], installed)?;
    clean(mode, &settings.out)?;
    let report = report(mode, &bundle, &settings, &scratch, &clock);
    let mut run = Run { bundle, settings, clock, scratch, report, nccl: None };
    run.report.rows = steps.iter().map(|step| Row::new(&step.program, step.kind)).collect();
    run.report.write(&run.settings.out)?;
    run.all(&steps)?;
    Ok(run.report.success())
}

/// Removes the results of an earlier run that this mode writes anew. Figures of benchmarks that this mode does not run
/// stay.
fn clean(mode: Mode, out: &Path) -> anyhow::Result<()> {
    remove_parts(out);
    let measured = match mode {
        Mode::SmokeBench => &MEASURED[..],
        Mode::Cpu => &MEASURED_ON_CPU,
        Mode::Tests | Mode::Profile => &[],
    };
    let files = REPLACED.iter().chain(measured).map(|name| out.join(name));
    for file in files.filter(|file| file.exists()) {
        fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
    }
    Ok(())
}

fn report(mode: Mode, bundle: &Path, settings: &Settings, scratch: &Scratch, clock: &Clock) -> Report {
    let stand_in = std::env::var_os("MESHSTEP_STANDIN").is_some_and(|value| value == "1");
    let [gpu, driver] = machine::gpu_and_driver(scratch, clock);
    let commit = fs::read_to_string(bundle.join("commit")).unwrap_or_default().trim().to_owned();
    let report = Report {
        commit: if commit.is_empty() { "unknown".to_owned() } else { commit },
        date: machine::now(),
        gpu: if stand_in { "none, the stand-in for the driver".to_owned() } else { gpu },
        driver,
        mode: mode.name(),
        limits: settings.limits,
        stand_in,
        ended: Ended::Running,
        rows: Vec::new(),
    };
    say(&format!("Meshstep {} on: {} (driver {})", report.commit, report.gpu, report.driver));
    report
}

impl Run {
    fn all(&mut self, steps: &[Step]) -> anyhow::Result<()> {
        let mut stop = None;
        for (idx, step) in steps.iter().enumerate() {
            stop = self.clock.stop();
            if stop.is_some() {
                break;
            }
            self.step(idx, step)?;
        }
        // If the deadline or a signal ended a program, it also ended the run.
        let cut = |verdict: &Verdict| self.report.rows.iter().any(|row| row.verdict == *verdict);
        self.report.ended = match stop {
            Some(Stop::Signal) => Ended::Signal,
            Some(Stop::Deadline) => Ended::Deadline,
            None if cut(&Verdict::BySignal) => Ended::Signal,
            None if cut(&Verdict::AtDeadline) => Ended::Deadline,
            None => Ended::Done,
        };
        remove_parts(&self.settings.out);
        self.scratch.archive(&self.settings.out)?;
        self.report.write(&self.settings.out)?;
        self.summary();
        Ok(())
    }

    fn step(&mut self, idx: usize, step: &Step) -> anyhow::Result<()> {
        let started = Instant::now();
        let mut row = Row { verdict: Verdict::Running, ..Row::new(&step.program, step.kind) };
        self.keep(idx, &row)?;
        if let Err(error) = self.work(idx, step, &mut row) {
            row.verdict = Verdict::NotStarted(format!("{error:#}"));
        }
        row.seconds = started.elapsed().as_secs_f64();
        remove_parts(&self.settings.out);
        self.keep(idx, &row)?;
        self.show(&row);
        if let Err(error) = self.scratch.archive(&self.settings.out) {
            // Only the archive at the end of the run must succeed.
            complain(&format!("{error:#}"));
        }
        Ok(())
    }

    fn work(&mut self, idx: usize, step: &Step, row: &mut Row) -> anyhow::Result<()> {
        match &step.work {
            Work::Skip(reason) => row.verdict = Verdict::Skipped((*reason).to_owned()),
            Work::Plain { path, args, env } => {
                let mut env: Vec<(String, OsString)> =
                    env.iter().map(|&(name, value)| (name.to_owned(), value.into())).collect();
                if step.kind == Kind::Stages {
                    // Without NCCL the program reports by itself that it is missing.
                    env.extend(self.nccl_env().unwrap_or_default());
                }
                self.plain(row, (path, args), env)?;
            }
            Work::Suite { .. } if step.kind == Kind::Nccl && self.nccl_env().is_none() => {
                row.verdict = Verdict::Skipped("no libnccl.so.2".to_owned());
            }
            Work::Suite { path, before, tests } => self.suite(idx, row, (path, before), tests)?,
        }
        Ok(())
    }

    /// Stores a row and writes the record.
    fn keep(&mut self, idx: usize, row: &Row) -> anyhow::Result<()> {
        self.report.rows[idx] = row.clone();
        self.report.write(&self.settings.out)
    }

    /// Returns the environment of NCCL tests, or `None` if there is no NCCL.
    fn nccl_env(&mut self) -> Option<Vec<(String, OsString)>> {
        let search = || nccl::search(&self.bundle, &self.scratch, &self.clock);
        self.nccl.get_or_insert_with(search).clone()
    }

    fn launch(
        &self,
        row: &Row,
        (program, args): (&Path, &[OsString]),
        env: Vec<(String, OsString)>,
    ) -> Launch {
        let own =
            [("REQUIRE_GPU".to_owned(), "1".into()), ("OUT".to_owned(), self.settings.out.clone().into())];
        let [stdout, stderr] = ["out", "err"].map(|output| self.scratch.file(&row.program, output));
        let env = own.into_iter().chain(env).collect();
        Launch { program: program.to_owned(), args: args.to_vec(), env, stdout, stderr }
    }

    fn plain(
        &self,
        row: &mut Row,
        command: (&PathBuf, &[OsString]),
        mut env: Vec<(String, OsString)>,
    ) -> anyhow::Result<()> {
        let limit = self.limit(row.kind);
        if std::env::var_os("GPU_BENCH_SECONDS").is_none() {
            // With this budget, a benchmark ends by itself and reports the cases that it has not measured.
            let seconds = limit.min(self.clock.left()).as_secs_f64() * 0.85;
            env.push(("GPU_BENCH_SECONDS".to_owned(), format!("{seconds:.0}").into()));
        }
        let mut text = Vec::new();
        let launch = self.launch(row, (command.0, command.1), env);
        let end = launch.run(limit, &self.clock, |piece| {
            text.extend_from_slice(piece);
            Wish::GoOn
        })?;
        set_end(row, &end);
        row.verdict = plain_verdict(&end, &String::from_utf8_lossy(&text), &launch.stderr);
        Ok(())
    }

    fn limit(&self, kind: Kind) -> Duration {
        let limits = &self.settings.limits;
        let measures = matches!(kind, Kind::Bench | Kind::Torch | Kind::Stages | Kind::Cpu);
        duration(if measures { limits.measuring } else { limits.program })
    }

    fn suite(
        &mut self,
        idx: usize,
        row: &mut Row,
        (path, before): (&Path, &[OsString]),
        tests: &[&str],
    ) -> anyhow::Result<()> {
        let env = self.nccl.clone().flatten().unwrap_or_default();
        let limit = self.limit(row.kind);
        let slower = if before.is_empty() { 1 } else { SANITIZED };
        let (mut report, out) = (self.report.clone(), self.settings.out.clone());
        let named = row.clone();
        let launch = |args: &[String]| {
            let whole: Vec<OsString> =
                before.iter().cloned().chain([path.into()]).chain(args.iter().map(Into::into)).collect();
            self.launch(&named, (Path::new(&whole[0]), &whole[1..]), env.clone())
        };
        let list_args = ["--list", "--format", "terse"].map(OsString::from);
        let mut list = self.launch(row, (path, &list_args), env.clone());
        list.stdout = self.scratch.file(&row.program, "list");
        let chosen = |all: Vec<String>| -> Vec<String> {
            let wanted =
                |name: &String| tests.is_empty() || tests.iter().any(|begin| name.starts_with(begin));
            all.into_iter().filter(wanted).collect()
        };
        let limits = [limit, duration(self.settings.limits.test) * slower];
        let suite = Suite { launch: &launch, list, chosen: &chosen, limits, clock: &self.clock };
        suite.run(row, &mut |now| {
            report.rows[idx] = now.clone();
            // Only the record after the program must succeed.
            let _ = report.write(&out);
        })
    }

    /// Prints the program's line of the table, and the output of a benchmark or of a failed program.
    fn show(&self, row: &Row) {
        let Row { program, verdict, seconds, passed, skipped, not_run, .. } = row;
        let failed = row.failed.len() + row.hung.len() + row.crashed.len();
        say(&format!(
            "{program:44} {passed:5} passed {failed:4} failed {skipped:4} skipped {not_run:4} not run {seconds:7.1} s   \
             {verdict}"
        ));
        let [stdout, stderr] = ["out", "err"].map(|output| self.scratch.file(program, output));
        if matches!(row.kind, Kind::Smoke | Kind::Bench | Kind::Torch | Kind::Stages | Kind::Cpu) {
            say(&tail(&stdout, SHOWN[1]));
        }
        for (what, tests) in [("failed", &row.failed), ("hung", &row.hung), ("crashed", &row.crashed)] {
            tests.iter().for_each(|test| say(&format!("  {what}: {test}")));
        }
        if !matches!(verdict, Verdict::Passed | Verdict::Skipped(_)) {
            say(&tail(&stderr, SHOWN[0]));
        }
    }

    fn summary(&self) {
        let rows = &self.report.rows;
        let of = |good: fn(&Verdict) -> bool| rows.iter().filter(|row| good(&row.verdict)).count();
        let passed = of(|verdict| *verdict == Verdict::Passed);
        let skipped = of(|verdict| matches!(verdict, Verdict::Skipped(_)));
        let not_run = of(|verdict| *verdict == Verdict::NotRun);
        let failed = rows.len() - passed - skipped - not_run;
        let ended = match self.report.ended {
            Ended::Deadline => "; ended at the deadline",
            Ended::Signal => "; ended by a signal",
            Ended::Running | Ended::Done => "",
        };
        say(&format!(
            "{} programs: {passed} ok, {failed} failed, {skipped} skipped, {not_run} not run{ended}; {}",
            rows.len(),
            self.settings.out.join("results.json").display()
        ));
        for row in rows.iter().filter(|row| row.verdict != Verdict::Passed) {
            say(&format!("  {}: {}", row.program, row.verdict));
        }
    }
}

/// Returns the verdict on a program that is not a test program.
fn plain_verdict(end: &End, stdout: &str, stderr: &Path) -> Verdict {
    let reason = stdout.lines().find_map(|line| line.strip_prefix("skipped: "));
    match (end, reason) {
        (End::Exit(0), Some(reason)) => Verdict::Skipped(reason.to_owned()),
        (End::Exit(0), None) => Verdict::Passed,
        (End::Exit(_), _) => Verdict::Failed,
        (End::Signal(_), _) => Verdict::Crashed,
        (End::NotStarted, _) => Verdict::NotStarted(tail(stderr, 1)),
        (End::Limit | End::Ended, _) => Verdict::OverLimit,
        (End::Stop(stop), _) => stopped(*stop),
    }
}
