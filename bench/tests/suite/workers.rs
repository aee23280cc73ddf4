//! `meshstep arbiter` and a worker as processes, and ranks that a launcher starts with contradictory options.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// Options of a short training.
const TRAINING: &[&str] = &[
    "--local",
    "local-adam",
    "--kx",
    "1",
    "--workers",
    "1",
    "--steps",
    "6",
    "--batch",
    "1",
    "--held-out",
    "1",
];

/// An arbiter that is killed when it is dropped.
struct Arbiter(Child);

impl Drop for Arbiter {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// The program `meshstep`, which a test run of the whole workspace has built.
pub(crate) fn meshstep(args: &[&str]) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_meshstep-bench")).with_file_name("meshstep");
    if !program.exists() {
        let built = Command::new(env!("CARGO")).args(["build", "-q", "-p", "meshstep"]).status().unwrap();
        assert!(built.success() && program.exists(), "{} is not built", program.display());
    }
    alone(Command::new(program), args)
}

fn bench(args: &[&str]) -> Command {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/src/train");
    let mut command = alone(Command::new(env!("CARGO_BIN_EXE_meshstep-bench")), args);
    command.args(["--corpus", corpus]);
    command
}

/// Variables of a launcher that runs these tests do not count.
pub(crate) fn alone(mut command: Command, args: &[&str]) -> Command {
    command.args(args);
    for name in ["RANK", "WORLD_SIZE", "MESHSTEP_TOKEN", "MESHSTEP_TOKEN_FILE"] {
        command.env_remove(name);
    }
    command
}

/// Starts an arbiter, and returns it with its address.
fn arbiter(log: &Path, addr: &str) -> (Arbiter, String) {
    arbiter_with(log, addr, &[])
}

fn arbiter_with(log: &Path, addr: &str, options: &[&str]) -> (Arbiter, String) {
    let mut command =
        meshstep(&["arbiter", "--workers", "1", "--addr", addr, "--log", log.to_str().unwrap()]);
    let mut child = command.args(options).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let addr = line.split(" on ").nth(1).and_then(|rest| rest.split(',').next()).unwrap().to_owned();
    (Arbiter(child), addr)
}

fn worker(addr: &str, out: &Path) -> Output {
    let out = out.to_str().unwrap();
    let mut command = bench(&["train", "--arbiter", addr, "--worker", "0", "--alone", "0", "--out", out]);
    command.args(TRAINING).output().unwrap()
}

#[test]
fn a_worker_trains_with_an_arbiter_of_its_own_and_another_arbiter_continues_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let (first, addr) = arbiter(&log, "127.0.0.1:0");
    let output = worker(&addr, dir.path());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("worker 0: steps 0 to 6, 1 epochs, 0 failed exchanges"), "{text}");
    let report = std::fs::read(dir.path().join("worker-0.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    assert_eq!(report["lives"][0]["losses"].as_array().unwrap().len(), 6);
    // The arbiter is killed. Its successor knows from the log that the run is over: nobody has its state.
    drop(first);
    let (_second, again) = arbiter(&log, &addr);
    assert_eq!(again, addr);
    let output = worker(&addr, dir.path());
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && error.contains("begin a new run, with a new log"), "{error}");
}

/// Returns the digest of the worker's last parameters.
fn digest(out: &Path) -> String {
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(out.join("worker-0.json")).unwrap()).unwrap();
    let life = &report["lives"][0];
    assert_eq!((life["failed"].as_array().unwrap().len(), &life["ended"]), (0, &serde_json::Value::Null));
    life["digest"].as_str().unwrap().to_owned()
}

#[test]
fn an_arbiter_that_is_killed_and_continues_its_log_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let (_arbiter, addr) = arbiter(&dir.path().join("undisturbed"), "127.0.0.1:0");
    assert!(worker(&addr, dir.path()).status.success());
    let undisturbed = digest(dir.path());
    let log = dir.path().join("log");
    let (mut current, addr) = arbiter(&log, "127.0.0.1:0");
    std::thread::scope(|scope| {
        let trains = scope.spawn(|| worker(&addr, dir.path()));
        while !trains.is_finished() {
            std::thread::sleep(std::time::Duration::from_millis(300)); // some exchanges long
            drop(current);
            current = arbiter(&log, &addr).0;
        }
        let output = trains.join().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    });
    assert_eq!(digest(dir.path()), undisturbed);
}

/// Starts a standby of the arbiter at `addr`, and waits until it has the log.
fn standby(log: &Path, addr: &str) -> Arbiter {
    let mut command = meshstep(&["arbiter", "--follow", addr, "--log", log.to_str().unwrap()]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let has = lines.map(Result::unwrap).find(|line| line.contains("has the log, term 0.1"));
    assert!(has.is_some(), "the standby has ended");
    Arbiter(child)
}

#[test]
fn a_promoted_standby_continues_the_run_and_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let (_arbiter, addr) = arbiter(&dir.path().join("undisturbed"), "127.0.0.1:0");
    assert!(worker(&addr, dir.path()).status.success());
    let undisturbed = digest(dir.path());
    let [log, copy] = ["log", "copy"].map(|name| dir.path().join(name));
    let (active, first) = arbiter(&log, "127.0.0.1:0");
    let follows = standby(&copy, &first);
    let second = meshstep_cases::process::free_addr().to_string();
    let both = format!("{first},{second}");
    std::thread::scope(|scope| {
        let trains = scope.spawn(|| worker(&both, dir.path()));
        std::thread::sleep(std::time::Duration::from_millis(300)); // some exchanges long
        drop(active);
        drop(follows);
        let (_promoted, at) = arbiter_with(&copy, &second, &["--promote"]);
        assert_eq!(at, second);
        let output = trains.join().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    });
    assert_eq!(digest(dir.path()), undisturbed);
    let refused = meshstep(&["arbiter", "--promote", "--log", dir.path().join("none").to_str().unwrap()])
        .output()
        .unwrap();
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && error.contains("follow the active arbiter"), "{error}");
}

#[test]
fn a_rank_among_contradictory_variables_and_options_says_so() {
    let torchrun = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29999"),
    ];
    let refused = |args: &[&str], variables: &[(&str, &str)]| {
        let output = bench(args).envs(variables.iter().copied()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let error = refused(&["train", "--ranks", "3"], &torchrun);
    assert!(error.contains("2 processes were started, but --ranks is 3"), "{error}");
    let error = refused(&["train", "--mesh", "tp=4"], &torchrun);
    assert!(error.contains("the largest mesh has 4 ranks; start 4 processes"), "{error}");
    let error = refused(&["train"], &torchrun[..1]);
    assert!(error.contains("WORLD_SIZE is not set"), "{error}");
}
