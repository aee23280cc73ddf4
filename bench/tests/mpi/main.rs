//! `train` under `mpirun` ends with the parameters of a training on as many threads, at every stage. Started alone this program
//! starts itself under `mpirun`, and there it becomes the program that trains.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test program")]

use meshstep_cases::mpirun::{SCENARIO, launch};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// Returns a short training that writes to `out`.
fn train(out: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshstep-bench"));
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/src/train");
    command.args([
        "train",
        "--steps",
        "2",
        "--batch",
        "1",
        "--held-out",
        "1",
        "--corpus",
        corpus,
        "--out",
        out,
    ]);
    command
}

/// Returns the lines with the parameters' digests.
fn digests(output: &str) -> Vec<&str> {
    output.lines().filter(|line| line.starts_with("parameters of stage")).collect()
}

fn main() {
    if let Ok(out) = std::env::var(SCENARIO) {
        panic!("cannot become the program: {}", train(&out).exec());
    }
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().to_str().unwrap();
    let all = [4, 2];
    for ranks in &all[..if meshstep_cases::long() { 2 } else { 1 }] {
        let threads = train(out).args(["--ranks", &ranks.to_string()]).output().unwrap();
        let threads = String::from_utf8_lossy(&threads.stdout).into_owned();
        let ended = launch(out, *ranks, &[]);
        println!("{ranks} processes: {:.1} s", ended.took.as_secs_f64());
        assert!(ended.success && ended.orphans == 0, "{} orphans\n{}", ended.orphans, ended.output);
        let expected = digests(&threads);
        assert!(expected.len() == 3, "{threads}");
        assert_eq!(digests(&ended.output), expected, "{}", ended.output);
        println!("{}", expected.join("\n"));
    }
}
