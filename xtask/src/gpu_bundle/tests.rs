//! The bundle's size, and its script on programs that pass, fail, hang, and run nothing.

use super::*;

#[test]
fn the_size_stays_under_its_limit() {
    check_size((MOST << 20) - 1).unwrap();
    let error = check_size(MOST << 20).unwrap_err().to_string();
    assert!(error.contains("48.0 MiB"), "{error}");
}

/// A bundle of these programs, each the body of a shell script, and what `run.sh` says of it.
#[cfg(unix)]
struct Ran {
    success: bool,
    table: String,
    json: serde_json::Value,
}

#[cfg(unix)]
fn ran(name: &str, limit: &str, programs: &[(&str, &str)]) -> Ran {
    let target = Workspace::find().unwrap().target;
    let folder = target.join("xtask-tests").join(name);
    let _ = fs::remove_dir_all(&folder);
    for (path, body) in programs {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        executable(&write(&path, &format!("#!/bin/sh\n{body}\n")).unwrap()).unwrap();
    }
    fs::create_dir_all(&folder).unwrap();
    write(&folder.join("commit"), "0123, changed\n").unwrap();
    let script = write(&folder.join("run.sh"), RUN).unwrap();
    let mut sh = Command::new("sh");
    sh.arg(script).env("LIMIT", limit).env("OUT", folder.join("out")).env_remove("MESHSTEP_STANDIN");
    let output = sh.output().unwrap();
    let json = fs::read(folder.join("out/tests.json")).unwrap();
    Ran {
        success: output.status.success(),
        table: String::from_utf8(output.stdout).unwrap(),
        json: serde_json::from_slice(&json).unwrap(),
    }
}

#[cfg(unix)]
const PASSES: &str = "[ \"$REQUIRE_GPU$1$2$3\" = 1--test-threads1--show-output ] && echo 'skipped: x' && echo 'test result: ok. 12 passed; 0 failed; 0 ignored;'";

#[cfg(unix)]
#[test]
fn what_passes_is_written_down() {
    let ran =
        ran("passes", "60", &[("tests/a", PASSES), ("bench/b", "[ -d \"$OUT\" ]"), ("tests/c", PASSES)]);
    assert!(ran.success, "{}", ran.table);
    assert!(ran.table.contains("3 programs, 0 failed"), "{}", ran.table);
    assert_eq!((&ran.json["commit"], &ran.json["stand_in"]), (&"0123, changed".into(), &false.into()));
    let programs = ran.json["programs"].as_array().unwrap();
    let of = |name: &str| programs.iter().find(|program| program["program"] == name).unwrap();
    assert_eq!(
        (&of("a")["passed"], &of("a")["failed"], &of("a")["exit"]),
        (&12.into(), &0.into(), &0.into())
    );
    assert_eq!((&of("a")["skipped"], &of("b")["skipped"]), (&1.into(), &0.into()));
    assert_eq!((&of("b")["kind"], &of("b")["passed"]), (&"bench".into(), &serde_json::Value::Null));
    assert_eq!(programs[2]["program"], "b", "what measures comes last");
}

#[cfg(unix)]
#[test]
fn every_way_of_failing_fails_the_whole() {
    let cases = [
        ("fails", "echo 'test result: FAILED. 3 passed; 2 failed; 0 ignored;'; exit 101", "failed with 101"),
        ("none", "echo 'test result: ok. 0 passed; 0 failed; 0 ignored;'", "ran no test"),
        ("silent", "true", "ran no test"),
        ("dies", "kill -9 $$", "failed with 137"),
        ("hangs", "exec sleep 60", "failed with 124"),
    ];
    for (name, body, verdict) in cases {
        let limit = if name == "hangs" { "1" } else { "60" };
        let ran = ran(name, limit, &[("tests/a", PASSES), ("tests/b", body)]);
        assert!(!ran.success, "{name}: {}", ran.table);
        assert!(ran.table.contains("2 programs, 1 failed"), "{name}: {}", ran.table);
        assert_eq!(ran.json["programs"][1]["verdict"], verdict, "{name}");
    }
    assert!(!ran("measures", "60", &[("tests/a", PASSES), ("bench/b", "exit 3")]).success);
    assert!(!ran("empty", "60", &[]).success);
}
