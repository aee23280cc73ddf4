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
    fs::create_dir_all(&folder).unwrap();
    write(&folder.join("gpu_torch.py"), "import sys\nprint('beside', sys.argv[1])\n").unwrap();
    for (path, body) in programs {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        executable(&write(&path, &format!("#!/bin/sh\n{body}\n")).unwrap()).unwrap();
    }
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
const PASSES: &str = "[ \"$REQUIRE_GPU$*\" = \"1--test-threads 1 --show-output cuda:: nccl::\" ] && echo 'skipped: x' && echo 'test result: ok. 12 passed; 0 failed; 0 ignored;'";

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
    let beside = ["beside /", "skipped: no python3"].map(|told| ran.table.matches(told).count());
    assert!(beside.contains(&2), "PyTorch before and after: {}", ran.table);
}

/// Says of NCCL what a program that is asked for it would, and is a test program that ends like this one else.
#[cfg(unix)]
fn with_nccl(probed: &str, otherwise: &str) -> String {
    format!(
        "case \"$2\" in nccl::processes::what_is_probed_is_printed) echo '{probed}'; exit 0;; esac; {otherwise}"
    )
}

#[cfg(unix)]
#[test]
fn tests_of_nccl_are_skipped_only_where_there_is_none() {
    let run = |name: &str, probed: &str, otherwise: &str| {
        let program = with_nccl(probed, otherwise);
        ran(name, "60", &[("tests/a", PASSES), ("nccl/meshstep-comm-suite", &program), ("nccl/z", otherwise)])
    };
    let missing = run("no-nccl", "probed: Err(NoLibrary { tried: \"libnccl.so.2\" })", "exit 101");
    assert!(missing.success, "{}", missing.table);
    assert!(missing.table.contains("3 programs, 0 failed, 2 skipped"), "{}", missing.table);
    assert!(missing.table.contains("NOT RUN: tests of NCCL"), "{}", missing.table);
    let programs = missing.json["programs"].as_array().unwrap();
    assert_eq!(programs[1]["verdict"], "skipped: no libnccl.so.2");
    assert_eq!((&programs[2]["exit"], &programs[2]["kind"]), (&serde_json::Value::Null, &"nccl".into()));

    let found = run("nccl", "probed: Ok(Found { version: 22800, stand_in: false })", PASSES);
    assert!(found.success && !found.table.contains("NOT RUN"), "{}", found.table);
    assert!(found.table.contains("3 programs, 0 failed, 0 skipped"), "{}", found.table);
    // One that is there and cannot be used fails, as do tests that do.
    for probed in ["probed: Err(TooOld { library: \"libnccl.so.2\" })", "probed: Ok(Found)"] {
        let broken = run("old-nccl", probed, "exit 101");
        assert!(!broken.success, "{}", broken.table);
        assert!(broken.table.contains("3 programs, 2 failed, 0 skipped"), "{}", broken.table);
    }
    // Nothing but skips is no success.
    let program = with_nccl("probed: Err(NoLibrary)", "exit 101");
    assert!(!ran("only-nccl", "60", &[("nccl/meshstep-comm-suite", &program)]).success);
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
    let torch =
        ran("torch", "60", &[("tests/a", PASSES), ("bench/b", "true"), ("gpu_torch.py", "no python")]);
    assert!(!torch.success || torch.table.contains("skipped: no python3"), "{}", torch.table);
}
