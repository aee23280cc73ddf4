//! Nothing is left: no descriptors, no mappings, no files; and no allocations after warm-up.

use super::common::{SMALL, read_all, world, write_all};
use super::processes::pouring;
use crate::p2p::transport::{Source, Target};
use std::process::Command;

/// Variable of a process that runs one test alone, because it counts for the whole process.
const ALONE: &str = "MESHSTEP_TEST_SHARED_ALONE";

fn alone(test: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let name = format!("shared_memory::linux::tests::leftovers::{test}");
    let mut command = Command::new(std::env::current_exe().unwrap());
    let ran = command.args(["--exact", &name, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let told = String::from_utf8_lossy(&ran.stdout);
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && told.contains("1 passed"), "{told}{errors}");
    false
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mappings(process: &str) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    maps.lines().filter(|line| line.contains("memfd:meshstep")).count()
}

fn files() -> usize {
    std::fs::read_dir("/dev/shm").map_or(0, Iterator::count)
}

#[test]
fn a_dropped_group_leaves_no_descriptor_and_no_mapping() {
    if !alone("a_dropped_group_leaves_no_descriptor_and_no_mapping") {
        return;
    }
    let before = (descriptors(), mappings("self"), files());
    for _ in 0..3 {
        let mut ranks = world(4, SMALL);
        let mut groups: Vec<_> = ranks.iter_mut().map(|rank| rank.split(&[3, 2, 1, 0], 1).unwrap()).collect();
        write_all(&mut *groups[0], Target::Rank(0), &[1; 100]).unwrap();
        read_all(&mut *groups[3], Source::Rank(3), &mut [0; 100]).unwrap();
        assert!(mappings("self") > 0);
        assert!(descriptors() > before.0);
    }
    assert_eq!((descriptors(), mappings("self"), files()), before);
}

#[test]
fn a_met_group_keeps_a_socket_and_a_bell_for_each_peer() {
    if !alone("a_met_group_keeps_a_socket_and_a_bell_for_each_peer") {
        return;
    }
    let before = descriptors();
    let ranks = world(4, SMALL);
    // Four ranks with three peers each, an own bell and an epoll.
    assert_eq!(descriptors() - before, 4 * (3 * 2 + 2));
    drop(ranks);
}

#[test]
fn survivors_drop_the_memory_of_a_killed_process() {
    let before = files();
    let mut children = pouring(3);
    assert!(mappings(&children[1].id().to_string()) > 0);
    assert_eq!(files(), before, "the memory has a name");
    children[0].kill();
    assert_eq!(children[1].says("lost "), "Lost { peer: 0, why: Closed }");
}
