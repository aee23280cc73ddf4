//! Signals to a training at random moments: it saves its last step, exits with 143, and goes on to the same bits.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use meshstep_cases::{cases, hash};

use crate::workers::{alone, meshstep};

/// Steps of the training.
const STEPS: u64 = 7;

/// Steps between two checkpoints.
const INTERVAL: u64 = 3;

const TRAINING: &str = "train --mesh dp=4 --stage 2 --steps 7 --save-every 3";

/// The same training, alone in a process or on four of them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ranks {
    Threads,
    Processes,
}

/// A running training.
struct Training {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

/// End of a training.
#[derive(Debug)]
struct End {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ranks {
    fn command(self, words: &str) -> Command {
        let bench = env!("CARGO_BIN_EXE_meshstep-bench");
        let words: Vec<&str> = words.split_whitespace().collect();
        let mut command = match self {
            Ranks::Threads => alone(Command::new(bench), &words),
            Ranks::Processes => meshstep(&[&["launch", "-n", "4", "--", bench], &words[..]].concat()),
        };
        command.args(["--corpus", concat!(env!("CARGO_MANIFEST_DIR"), "/src/train")]);
        command
    }

    fn start(self, out: &Path, more: &str) -> Training {
        start(self.command(&format!("{TRAINING} {more}")), out)
    }
}

/// Starts a training, and returns once all of its processes handle signals, which its first line follows.
fn start(mut command: Command, out: &Path) -> Training {
    command.arg("--out").arg(out).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert!(line.contains("text: "), "{line}");
    Training { child, stdout }
}

impl Training {
    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    fn finish(mut self) -> End {
        let (mut stdout, mut stderr) = (String::new(), String::new());
        self.stdout.read_to_string(&mut stdout).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        End { code: self.child.wait().unwrap().code(), stdout, stderr }
    }
}

/// Returns what a training has ended with: losses, norms and the digest of its parameters, as its report has them.
fn results(out: &Path) -> [String; 3] {
    let report = std::fs::read(out.join("train.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    ["losses", "norms", "digest"].map(|name| report[0][name].to_string())
}

/// Returns the step of the newest checkpoint.
fn newest(out: &Path) -> Option<u64> {
    let latest = std::fs::read(out.join("checkpoints/LATEST")).ok()?;
    serde_json::from_slice::<serde_json::Value>(&latest).unwrap()["step"].as_u64()
}

/// Trains without a signal; returns the results and the time from the first line to the end.
fn undisturbed(ranks: Ranks, out: &Path) -> ([String; 3], Duration) {
    let training = ranks.start(out, "");
    let begin = Instant::now();
    let end = training.finish();
    assert_eq!(end.code, Some(0), "{end:?}");
    (results(out), begin.elapsed())
}

/// Starts trainings until one still runs at its moment, which is sooner each time, and gets the signal; returns its folder and its end.
fn signalled(
    ranks: Ranks,
    dir: &Path,
    signal: &str,
    mut moment: Duration,
    expected: &[String; 3],
) -> (PathBuf, End) {
    loop {
        let out = dir.join(format!("{}", moment.as_nanos()));
        let training = ranks.start(&out, "");
        std::thread::sleep(moment);
        training.signal(signal);
        let end = training.finish();
        if end.code != Some(0) {
            return (out, end);
        }
        // This run had ended before.
        assert_eq!(results(&out), *expected);
        moment = moment.mul_f64(0.8);
    }
}

/// Sends one signal at a moment of its own to each of `count` trainings, and lets each go on.
fn at_random_moments(ranks: Ranks, count: u32) {
    let dir = tempfile::tempdir().unwrap();
    let (expected, lasts) = undisturbed(ranks, &dir.path().join("whole"));
    let mut steps = Vec::new();
    for case in 0..u64::from(count) {
        let signal = if case % 3 == 1 { "-USR1" } else { "-TERM" };
        // One moment in each part of the run.
        let part = (case as f64 + (hash(&[case]) % 1000) as f64 / 1000.0) / f64::from(count);
        let (out, end) = signalled(ranks, dir.path(), signal, lasts.mul_f64(part), &expected);
        assert_eq!(end.code, Some(143), "case {case}: {end:?}");
        // A run that has taken its last step finishes its report.
        let step = stopped_after(&end.stderr).unwrap_or(STEPS);
        assert_eq!(newest(&out), Some(step), "case {case}: {end:?}");
        let resumed = ranks.start(&out, "--resume").finish();
        assert_eq!(resumed.code, Some(0), "case {case}: {resumed:?}");
        assert_eq!(results(&out), expected, "case {case}, stopped after step {step}");
        steps.push(step);
    }
    println!("{ranks:?}: stopped after steps {steps:?}");
    assert!(count == 1 || steps.iter().any(|step| step % INTERVAL != 0), "{steps:?}");
}

/// Returns the step after which a training says that it has stopped.
fn stopped_after(stderr: &str) -> Option<u64> {
    let (_, rest) = stderr.split_once("a signal ended the run after step ")?;
    assert!(rest.contains("--resume continues there"), "{stderr}");
    rest.split(',').next()?.parse().ok()
}

#[test]
fn a_training_survives_a_signal_at_any_moment() {
    at_random_moments(Ranks::Threads, cases(3, 50));
}

#[test]
fn four_processes_survive_a_signal_at_any_moment() {
    at_random_moments(Ranks::Processes, cases(3, 50));
}

#[test]
fn a_signal_to_one_process_ends_all_of_them_after_the_same_step() {
    let dir = tempfile::tempdir().unwrap();
    let training = Ranks::Processes.start(dir.path(), "");
    // The launcher's third child is one rank; which one does not matter.
    let launcher = training.child.id();
    let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
    let rank = children.split_whitespace().nth(2).unwrap();
    assert!(Command::new("kill").args(["-USR1", rank]).status().unwrap().success());
    let end = training.finish();
    assert_eq!(end.code, Some(143), "{end:?}");
    assert_eq!(newest(dir.path()), Some(stopped_after(&end.stderr).unwrap()));
}

#[test]
fn without_checkpoints_the_training_ends_and_says_that_nothing_is_saved() {
    let dir = tempfile::tempdir().unwrap();
    let words = TRAINING.replace(" --save-every 3", "");
    let training = start(Ranks::Threads.command(&words), dir.path());
    training.signal("-TERM");
    let end = training.finish();
    assert_eq!((end.code, end.stdout.contains("digest")), (Some(143), false), "{end:?}");
    assert!(end.stderr.contains("; nothing is saved without --save-every"), "{end:?}");
    assert!(!dir.path().join("checkpoints").exists());
}

#[test]
fn the_first_ctrl_c_saves_and_the_second_ends_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let out: PathBuf = dir.path().join("once");
    let training = Ranks::Threads.start(&out, "");
    training.signal("-INT");
    let end = training.finish();
    assert_eq!(end.code, Some(130), "{end:?}");
    assert_eq!(newest(&out), Some(stopped_after(&end.stderr).unwrap()));
    // A step of many seconds, in the middle of which both come.
    let out = dir.path().join("twice");
    let words = "train --stage 1 --ranks 1 --batch 256 --save-every 1";
    let training = start(Ranks::Threads.command(words), &out);
    training.signal("-INT");
    std::thread::sleep(Duration::from_millis(300));
    let begin = Instant::now();
    training.signal("-INT");
    let end = training.finish();
    assert_eq!((end.code, stopped_after(&end.stderr), newest(&out)), (Some(130), None, None), "{end:?}");
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
}
