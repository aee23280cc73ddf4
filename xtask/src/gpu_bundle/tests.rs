//! Tests of the bundle's size and of the programs that the runner looks for. The runner has its own tests.

use super::*;

#[test]
fn the_size_stays_under_its_limit() {
    check_size((MOST << 20) - 1).unwrap();
    let error = check_size(MOST << 20).unwrap_err().to_string();
    assert!(error.contains("44.0 MiB"), "{error}");
}

#[cfg(unix)]
#[test]
fn packed_programs_keep_their_order_and_can_be_executed() {
    let folder = Workspace::find().unwrap().target.join("xtask-tests/gpu-bundle");
    let _ = fs::remove_dir_all(&folder);
    for path in ["tests/b", "a"] {
        fs::create_dir_all(folder.join(path).parent().unwrap()).unwrap();
        executable(&write(&folder.join(path), "text").unwrap()).unwrap();
    }
    let archive = folder.join(ARCHIVE);
    let bytes = pack(&folder, &["tests/b".into(), "a".into()], &archive).unwrap();
    assert_eq!(bytes, fs::metadata(&archive).unwrap().len());
    let listed = Command::new("tar").arg("-tvzf").arg(&archive).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let ends: Vec<&str> = listed.lines().filter_map(|line| line.split(' ').next_back()).collect();
    assert_eq!(ends, ["tests/b", "a"]);
    assert!(listed.lines().all(|line| line.starts_with("-rwxr-xr-x")), "{listed}");
    assert!(pack(&folder, &["gone".into()], &archive).is_err());
}

/// The runner names these programs, for example to probe for NCCL and to run under compute-sanitizer.
#[test]
fn programs_that_the_runner_names_are_there() {
    let places: Vec<PathBuf> = PROGRAMS.iter().map(programs::Program::place).collect();
    for name in [
        "gpu-runner",
        "cpu/meshstep-bench-cases-ranks",
        "stages/meshstep-bench-cases-stages",
        "nccl/meshstep-comm-suite",
        "tests/meshstep-optim-suite",
    ] {
        assert!(places.contains(&PathBuf::from(name)), "{name}: {places:?}");
    }
}
