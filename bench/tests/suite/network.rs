//! `meshstep-bench bench network`: a quick run in network namespaces, and a machine that makes none.

use std::path::Path;
use std::process::{Command, Output};

use meshstep_cases::{Effort, effort};
use serde_json::Value;

fn network(out: &Path, set: impl FnOnce(&mut Command)) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meshstep-bench"));
    command.args(["bench", "network", "--quick", "--out"]).arg(out);
    set(&mut command);
    command.output().unwrap()
}

#[test]
fn a_machine_that_makes_no_namespaces_is_told_so_and_gets_no_report() {
    let dir = tempfile::tempdir().unwrap();
    // Without a path there is no program `ip`.
    let output = network(dir.path(), |command| {
        command.env("PATH", "");
    });
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("makes no network namespaces; run as root with iproute2"), "{error}");
    assert!(!dir.path().join("report.json").exists());
}

#[test]
fn every_method_is_timed_at_every_rate_and_its_bytes_are_counted() {
    if effort() == Effort::Tenth {
        return println!("skipped: short runs start no trainings");
    }
    let dir = tempfile::tempdir().unwrap();
    let output = network(dir.path(), |_| ());
    let error = String::from_utf8(output.stderr).unwrap();
    if output.status.code() == Some(2) && error.contains("makes no network namespaces") {
        return println!("skipped: {error}");
    }
    let report = std::fs::read(dir.path().join("report.json")).unwrap_or_else(|_| panic!("{error}"));
    let report: Value = serde_json::from_slice(&report).unwrap();
    let section = &report["sections"][0];
    let rows = |table: usize| section["tables"][table]["rows"].as_array().unwrap().clone();
    assert_eq!([0, 1, 2, 3].map(|table| rows(table).len()), [7, 7, 4, 3]);
    let seconds = |cell: &Value| -> f64 {
        let text = cell["text"].as_str().unwrap().trim_end_matches('*').trim_end_matches(" s");
        text.parse().unwrap()
    };
    let times: Vec<Vec<f64>> = rows(0)
        .iter()
        .map(|row| row["cells"].as_array().unwrap()[3..].iter().map(seconds).collect())
        .collect();
    assert!(times.iter().all(|times| times.len() == 2 && times.iter().all(|time| *time > 0.0)), "{times:?}");
    // Plain AdamW of 2 workers at ten Mbit/s waits for the link, however busy the machine is; a burst is faster.
    let planned = rows(1)[0]["cells"][0]["bytes"].as_f64().unwrap();
    let [steps, to_target] = [&rows(0)[0]["cells"][1]["count"], &rows(0)[0]["cells"][2]["text"]]
        .map(|cell| cell.as_f64().unwrap_or_else(|| cell.as_str().unwrap().parse().unwrap()));
    let least = planned / 2.0 / steps * to_target / (10e6 / 8.0);
    assert!(times[0][1] > 0.7 * least && least > 0.5, "{times:?} {least}");
    let missed = section["bars"].as_array().unwrap().iter().filter(|bar| {
        let planned = bar["what"].as_str().unwrap().contains("/ planned");
        planned && bar["found"].as_f64().unwrap() > bar["wanted"]["at_most"].as_f64().unwrap()
    });
    assert_eq!(missed.collect::<Vec<_>>(), Vec::<&Value>::new());
}
