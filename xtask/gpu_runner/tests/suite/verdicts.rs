//! Each way in which a program can end has its own verdict, and none stops the other programs.

use crate::bundle::{Bundle, LIST, STAYS, tests_with};
use serde_json::json;
use std::time::Duration;

#[test]
fn each_program_has_its_verdict_and_the_run_goes_on() {
    let list_then = |body: &str| format!("case \"$*\" in *--list*) {LIST}; exit 0;; esac\n{body}");
    let programs = [
        ("tests/a-passes", tests_with("")),
        ("tests/b-fails", tests_with("nccl::b) echo FAILED; failed=1;;") + "\nexit ${failed:+101}"),
        ("tests/c-hangs", tests_with(&format!("nccl::b) {STAYS};;"))),
        ("tests/d-crashes", tests_with("nccl::b) kill -SEGV $$;;")),
        ("tests/e-exits", tests_with("nccl::b) exit 0;;")),
        ("tests/f-garbage", "head -c 5000 /dev/urandom".to_owned()),
        ("tests/g-mute", list_then("exit 0")),
        ("tests/h-nothing", "case \"$*\" in *--list*) printf 'other: test\\n';; esac".to_owned()),
        ("tests/i-early", list_then("kill -9 $$")),
        ("tests/j-passes", tests_with("")),
    ];
    let programs: Vec<(&str, &str)> = programs.iter().map(|(path, body)| (*path, body.as_str())).collect();
    let bundle = Bundle::new("verdicts", &programs);
    let ran = bundle.run("tests", &[("TEST_LIMIT", "0.8"), ("DEADLINE", "30")]);
    let expected = [
        ("a-passes", "ok"),
        ("b-fails", "failed"),
        ("c-hangs", "hung"),
        ("d-crashes", "crashed"),
        ("e-exits", "crashed"),
        ("f-garbage", "no test list"),
        ("g-mute", "ran no test"),
        ("h-nothing", "ran no test"),
        ("i-early", "crashed"),
        ("j-passes", "ok"),
    ];
    assert_eq!(ran.verdicts(), expected, "{}", ran.printed);
    assert_eq!((ran.code, &ran.json["ended"]), (Some(1), &"done".into()));
    assert_eq!(ran.row("a-passes")["passed"], 3, "only tests of the modules cuda and nccl must run");
    let counted = |program: &str| {
        let row = ran.row(program);
        (row["passed"].clone(), row["failed"].clone(), row["hung"].clone(), row["not_run"].clone())
    };
    let none = json!([]);
    assert_eq!(counted("b-fails"), (2.into(), json!(["nccl::b"]), none.clone(), 0.into()));
    // Another process ran the test after the one that hung.
    assert_eq!(counted("c-hangs"), (2.into(), none.clone(), json!(["nccl::b"]), 0.into()));
    assert_eq!(counted("d-crashes"), (2.into(), none.clone(), none.clone(), 0.into()));
    assert_eq!(ran.row("d-crashes")["crashed"], json!(["nccl::b"]));
    assert_eq!(ran.row("i-early")["signal"], 9);
    assert_eq!(ran.row("i-early")["not_run"], 3);
    assert!(bundle.logs().contains(&"logs/c-hangs.out".to_owned()), "{:?}", bundle.logs());
    bundle.wait_for_processes(0, 0);
}

#[test]
fn a_program_ends_at_its_limit_and_the_run_at_its_deadline() {
    let slow = tests_with("*) sleep 0.1; echo ok;;");
    let stays = tests_with(&format!("nccl::b) {STAYS};;"));
    let programs =
        [("tests/a", slow.as_str()), ("tests/b", stays.as_str()), ("tests/c", &stays), ("tests/d", &slow)];
    let bundle = Bundle::new("limits", &programs);
    let ran = bundle.run("tests", &[("LIMIT", "1.5"), ("DEADLINE", "4")]);
    let expected =
        [("a", "ok"), ("b", "ended at its limit"), ("c", "ended at the deadline"), ("d", "not run")];
    assert_eq!(ran.verdicts(), expected, "{}", ran.printed);
    assert_eq!((&ran.row("b")["passed"], &ran.row("b")["not_run"]), (&1.into(), &2.into()));
    assert_eq!((ran.code, &ran.json["ended"]), (Some(1), &"deadline".into()));
    assert!(ran.took < Duration::from_millis(6500), "{:?}", ran.took);
    bundle.wait_for_processes(0, 0);
}

#[test]
fn a_program_that_fills_its_logs_is_ended() {
    let floods = "case $1 in --measure) yes test ok;; esac";
    let bundle = Bundle::new("floods", &[("cpu/floods", floods), ("cpu/passes", "echo fine")]);
    let ran = bundle.run("cpu", &[("LIMIT", "20")]);
    assert_eq!(ran.verdicts()[..2], [("floods --measure", "ended at its limit"), ("passes --measure", "ok")]);
    assert!(ran.took < Duration::from_secs(10), "{:?}", ran.took);
    assert!(bundle.path("out/logs.tar").metadata().unwrap().len() < 9 << 20);
}
