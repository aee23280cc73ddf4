//! The bundle's size, and the programs that its runner looks for. The runner has tests of its own.

use super::*;

#[test]
fn the_size_stays_under_its_limit() {
    check_size((MOST << 20) - 1).unwrap();
    let error = check_size(MOST << 20).unwrap_err().to_string();
    assert!(error.contains("44.0 MiB"), "{error}");
}

/// The runner asks this program for NCCL, and has a sanitizer watch that one.
#[test]
fn programs_that_the_runner_names_are_there() {
    let places: Vec<PathBuf> = PROGRAMS.iter().map(programs::Program::place).collect();
    for name in ["gpu-runner", "nccl/meshstep-comm-suite", "tests/meshstep-optim-suite"] {
        assert!(places.contains(&PathBuf::from(name)), "{name}: {places:?}");
    }
}
