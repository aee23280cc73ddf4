//! Floods of strangers: a rank joins in time, ranks that have met go on, and rank 0's memory and threads are bounded.

use crate::rendezvous::common::{HEX, LONG, environment, free_addr, options};
use meshstep_cases::flood::{Flood, Way};
use meshstep_cases::long;
use meshstep_cases::process::Process;
use meshstep_comm::rendezvous::{Environment, Listener, Store, Token, connect};
use std::net::SocketAddr;
use std::sync::mpsc::{TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Length of a measurement: the strangers' time ends several times in it.
const WINDOW: Duration = Duration::from_millis(700);
/// Set if this binary runs as rank 0.
const CHILD: &str = "MESHSTEP_TEST_FLOODED";

/// Role of rank 0: joins, and gathers as long as rank 1 does. Without the variable it does nothing.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    println!("\nstarts");
    let store = Store::join(&Environment::from_env().unwrap(), &options(LONG)).unwrap();
    let generation = store.generation(0);
    while generation.all_gather("turn", &[0], LONG).is_ok() {}
}

fn rank_0(addr: SocketAddr) -> Process {
    let variables = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", &addr.ip().to_string()),
        ("MESHSTEP_PORT", &addr.port().to_string()),
        ("MESHSTEP_TOKEN", HEX),
        ("TORCHELASTIC_RUN_ID", "run"),
        ("TORCHELASTIC_RESTART_COUNT", "1"),
        (CHILD, "1"),
    ];
    let mut process = Process::start("rendezvous::flood::child", &variables);
    process.says("starts");
    process
}

/// Returns a number of the system's status of a process.
fn status(process: u32, field: &str) -> usize {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').split_whitespace().next().unwrap().parse().unwrap()
}

/// Returns the median time of an all-gather of both ranks.
fn gather_time(store: &Store) -> Duration {
    let generation = store.generation(0);
    let (begin, mut times) = (Instant::now(), Vec::new());
    while begin.elapsed() < WINDOW {
        let begin = Instant::now();
        generation.all_gather("turn", &[1], LONG).unwrap();
        times.push(begin.elapsed());
    }
    times.sort();
    times[times.len() / 2]
}

#[test]
fn a_rank_joins_and_ranks_go_on_during_a_flood_of_a_thousand() {
    for way in Way::ALL {
        let addr = free_addr();
        let rank_0 = rank_0(addr);
        // The store listens now.
        drop(super::wire::connect(addr));
        let flood = Flood::start(addr, way);
        let begin = Instant::now();
        let store = Store::join(&environment(addr, 1, 2), &options(LONG)).unwrap();
        let joined = begin.elapsed();
        // In turns, because the machine has other work.
        let (mut floods, mut ratios, mut opened) = (Some(flood), Vec::new(), 0);
        for _ in 0..3 {
            let flooded = gather_time(&store);
            opened += floods.take().map_or(0, Flood::stop);
            let idle = gather_time(&store);
            ratios.push(flooded.as_secs_f64() / idle.as_secs_f64());
            println!("{way:?}: all_gather {flooded:?} flooded, {idle:?} idle");
            floods = Some(Flood::start(addr, way));
        }
        opened += floods.take().map_or(0, Flood::stop);
        ratios.sort_by(f64::total_cmp);
        let (memory, threads) = (status(rank_0.id(), "VmHWM"), status(rank_0.id(), "Threads"));
        println!(
            "{way:?}: joined after {joined:?}, {opened} connections, ratios {ratios:.2?}, {memory} kB, {threads} threads"
        );
        assert!(joined < Duration::from_secs(1), "{way:?}: {joined:?}");
        assert!(memory < 16 << 10, "{way:?}: {memory} kB");
        assert!(threads < 8, "{way:?}: {threads}");
        assert!(ratios[ratios.len() / 2] < 3.0, "{way:?}: {ratios:?}");
        assert_eq!(store.generation(0).failure(), None);
        drop(store);
        if !long() && matches!(way, Way::Slow) {
            // Short runs try two ways.
            return;
        }
    }
}

#[test]
fn a_caller_reaches_a_service_during_a_flood_of_a_thousand() {
    let token = Token::from_hex(HEX).unwrap();
    let listener = Listener::bind(free_addr(), Some(&token), "service", LONG).unwrap();
    let (addr, listener_name) = (listener.addr(), &listener.name().to_owned());
    let (done, is_done) = channel::<()>();
    thread::scope(|scope| {
        let serve = move || {
            while is_done.try_recv() != Err(TryRecvError::Disconnected) {
                drop(listener.accept(Instant::now() + Duration::from_millis(20), LONG));
            }
        };
        scope.spawn(serve);
        // The listener ends with this, after a failure too.
        let _done = done;
        for way in Way::ALL {
            let flood = Flood::start(addr, way);
            let (begin, mut times) = (Instant::now(), Vec::new());
            while begin.elapsed() < WINDOW {
                let begin = Instant::now();
                connect(addr, Some(&token), "service", listener_name, LONG).unwrap();
                times.push(begin.elapsed());
            }
            times.sort();
            let (median, longest, opened) = (times[times.len() / 2], times[times.len() - 1], flood.stop());
            println!(
                "{way:?}: {} calls within {longest:?}, median {median:?}, {opened} connections",
                times.len()
            );
            assert!(longest < Duration::from_secs(1), "{way:?}: {longest:?}");
        }
    });
}
