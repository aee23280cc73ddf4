//! A runner that is ended early leaves its record and no process.

use crate::bundle::{Bundle, STAYS, tests_with};
use std::process::Child;

/// Returns a bundle of three programs, of which the second hangs in its second test.
fn bundle(name: &str) -> Bundle {
    let stays = tests_with(&format!("nccl::b) {STAYS};;"));
    let programs = [("tests/a", tests_with("")), ("tests/b", stays), ("tests/c", tests_with(""))];
    let programs: Vec<(&str, &str)> = programs.iter().map(|(path, body)| (*path, body.as_str())).collect();
    Bundle::new(name, &programs)
}

/// Starts a run, and signals the runner when the second program has all its processes.
fn signalled(bundle: &Bundle, signal: &str) -> (Child, Option<i32>) {
    let mut runner = bundle.start("tests", &[]);
    bundle.wait_for("b", "running");
    // The runner, the supervisor, the script, and the script's three children.
    bundle.wait_for_processes(6, 6);
    let killed = std::process::Command::new("kill").args([signal, &runner.id().to_string()]).status();
    assert!(killed.unwrap().success());
    let code = runner.wait().unwrap().code();
    (runner, code)
}

#[test]
fn sigterm_ends_the_programs_and_completes_the_record() {
    let bundle = bundle("term");
    for signal in ["-TERM", "-INT"] {
        let (_, code) = signalled(&bundle, signal);
        assert_eq!(code, Some(1));
        bundle.wait_for_processes(0, 0);
        let json = bundle.results();
        assert_eq!(json["ended"], "signal");
        let verdicts: Vec<&str> =
            json["rows"].as_array().unwrap().iter().map(|row| row["verdict"].as_str().unwrap()).collect();
        assert_eq!(verdicts, ["ok", "ended by a signal to the runner", "not run"]);
        assert_eq!(json["rows"][1]["passed"], 1);
        for log in ["logs/a.out", "logs/b.out"] {
            assert!(bundle.logs().contains(&log.to_owned()), "{log}");
        }
        bundle.check_files();
    }
}

#[test]
fn sigkill_leaves_the_record_of_what_had_passed_and_no_process() {
    let bundle = bundle("kill");
    signalled(&bundle, "-KILL");
    bundle.wait_for_processes(0, 0);
    let json = bundle.results();
    assert_eq!(json["ended"], "running");
    assert_eq!((&json["rows"][0]["verdict"], &json["rows"][0]["passed"]), (&"ok".into(), &3.into()));
    assert_eq!(
        (&json["rows"][1]["verdict"], &json["rows"][2]["verdict"]),
        (&"running".into(), &"not run".into())
    );
    assert!(bundle.logs().contains(&"logs/a.out".to_owned()));
    bundle.check_files();
}

#[test]
fn sigkill_at_any_moment_leaves_a_whole_record() {
    let quick = tests_with("");
    let programs: Vec<(String, &str)> = (0..9).map(|i| (format!("tests/{i}"), quick.as_str())).collect();
    let programs: Vec<(&str, &str)> = programs.iter().map(|(path, body)| (path.as_str(), *body)).collect();
    let bundle = Bundle::new("moments", &programs);
    for millis in [20, 60, 110, 170, 240, 330] {
        let mut runner = bundle.start("tests", &[]);
        std::thread::sleep(std::time::Duration::from_millis(millis));
        runner.kill().unwrap();
        runner.wait().unwrap();
        bundle.wait_for_processes(0, 0);
        // A record is never partial: `results` parses it.
        let json = bundle.results();
        assert!(json.is_null() || json["rows"].as_array().unwrap().len() == 9, "{json:#}");
    }
    let ran = bundle.run("tests", &[]);
    assert_eq!(ran.code, Some(0), "{}", ran.printed);
}
