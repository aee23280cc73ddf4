//! A flood of strangers at a rank's listener: new streams open in time, and the rank's memory and threads are bounded.

use super::common::{HEX, LONG, environment, options};
use crate::rendezvous::Environment;
use crate::tcp::meeting::meet_by;
use crate::tcp::{Encrypt, Options, World, join};
use crate::{Op, Reduction};
use meshstep_cases::flood::{Flood, Way};
use meshstep_cases::process::{Process, free_addr};
use meshstep_tensor::{Buffer, Category, Meter};
use std::time::{Duration, Instant};

/// Set if this binary runs as rank 1.
const CHILD: &str = "MESHSTEP_TEST_FLOODED_STREAMS";
/// Groups that are split off in one flood: each opens a stream to the flooded rank.
const GROUPS: usize = 20;

fn sockets() -> Options {
    Options { timeout: LONG, ..options(Encrypt::Always) }
}

/// Splits off groups and adds in each; returns the longest time.
fn split_and_add(world: &World) -> Duration {
    let comm = world.communicator();
    let add = |_| {
        let begin = Instant::now();
        let group = comm.split(Some(0), 0).unwrap().unwrap();
        let mut sum = Buffer::from_slice(&[1.0f32; 9], &Meter::new(), Category::Grads).unwrap();
        group.run(Op::all_reduce(Reduction::Sum), &mut sum).unwrap();
        assert_eq!(sum.typed::<f32>().unwrap(), [2.0; 9]);
        begin.elapsed()
    };
    (0..GROUPS).map(add).max().unwrap()
}

/// Role of rank 1. Without the variable it does nothing.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let route = |cards: Vec<crate::tcp::card::Card>| {
        println!("\nlistens {}", cards[1].addr);
        cards
    };
    let streams = meet_by(&Environment::from_env().unwrap(), &sockets(), route).unwrap();
    let world = World::over(streams).unwrap();
    for _ in Way::ALL {
        split_and_add(&world);
    }
    world.communicator().barrier().unwrap();
}

/// Returns a number of the system's status of a process.
fn status(process: u32, field: &str) -> usize {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn streams_open_during_a_flood_of_a_thousand() {
    let addr = free_addr();
    let (ip, port) = (addr.ip().to_string(), addr.port().to_string());
    let variables = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", &ip),
        ("MESHSTEP_PORT", &port),
        ("MESHSTEP_TOKEN", HEX),
        ("TORCHELASTIC_RUN_ID", "run"),
        (CHILD, "1"),
    ];
    let mut rank_1 = Process::start("tcp::tests::flood::child", &variables);
    let world = join(&environment(addr, 0, 2), &sockets()).unwrap();
    let listener = rank_1.says("listens ")["listens ".len()..].parse().unwrap();
    let before = status(rank_1.id(), "VmHWM");
    for way in Way::ALL {
        let flood = Flood::start(listener, way);
        let longest = split_and_add(&world);
        let threads = status(rank_1.id(), "Threads");
        println!("{way:?}: {} connections, a group took {longest:?}, {threads} threads", flood.stop());
        assert!(longest < Duration::from_secs(2), "{way:?}: {longest:?}");
        assert!(threads < 12, "{way:?}: {threads} threads");
    }
    let after = status(rank_1.id(), "VmHWM");
    println!("{before} kB before the floods, {after} kB after");
    assert!(after < before + (16 << 10), "{before} kB, then {after}");
    world.communicator().barrier().unwrap();
    assert!(rank_1.wait().success());
}
