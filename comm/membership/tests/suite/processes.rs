//! Workers and their arbiter as real processes that are killed, stopped and continued.

use crate::common::config;
use crate::remote::{caller, serve};
use meshstep_cases::long;
use meshstep_cases::process::{Process, free_addr};
use meshstep_membership::{Ballot, Caller, Config, Decision, Error, Membership, Remote};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

/// Set if this binary runs as a worker (its id) or as the arbiter (its log).
const WORKER: &str = "MESHSTEP_TEST_WORKER";
const ARBITER: &str = "MESHSTEP_TEST_ARBITER";
const ADDR: &str = "MESHSTEP_TEST_ADDR";
/// Set if a worker's deadline differs from [`DEADLINE`], in seconds.
const WAITS: &str = "MESHSTEP_TEST_WAITS";

/// Upper bound on decisions that take both silence and patience, on a busy machine.
const BOUND: Duration = Duration::from_secs(20);
/// Longest wait of a worker for an answer.
const DEADLINE: Duration = Duration::from_secs(12);

/// Two seconds of silence and four of patience.
fn quick() -> Config {
    Config { silence: Duration::from_secs(2), patience: Duration::from_secs(4), ..config(3, 1) }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Child process: executes orders from its standard input, line by line. In a normal test run it does nothing.
#[test]
fn child() {
    let Some(addr) = variable(ADDR) else { return };
    let addr: SocketAddr = addr.parse().unwrap();
    let mut orders = std::io::stdin().lines().map(Result::unwrap);
    if let Some(log) = variable(ARBITER) {
        let _service = serve(addr, quick(), Path::new(&log));
        println!("\nserving");
        orders.next();
        return;
    }
    let id = variable(WORKER).unwrap().parse().unwrap();
    let deadline = variable(WAITS).map_or(DEADLINE, |secs| Duration::from_secs(secs.parse().unwrap()));
    let worker = Remote::join(Caller { deadline, ..caller(addr, id) }).unwrap();
    println!("\njoined");
    let mut round = None;
    for order in orders {
        let (order, step) = order.split_once(' ').unwrap();
        match order {
            "boundary" => match worker.boundary(step.parse().unwrap()) {
                Ok(granted) => {
                    let ids: Vec<u64> = granted.members.iter().map(|seat| seat.id).collect();
                    let (epoch, divisor) = (granted.epoch, granted.divisor());
                    println!("\ngranted step {} epoch {epoch} of {ids:?} by {divisor}", granted.step);
                    round = Some(granted);
                }
                Err(error) => println!("\nerror {error}"),
            },
            "vote" => match worker.vote(round.as_ref().unwrap(), Ballot::Ready) {
                Ok(Decision::Commit {}) => println!("\ncommit"),
                Ok(decision) => println!("\nabort {decision:?}"),
                Err(error) => println!("\nerror {error}"),
            },
            _ => return worker.leave().unwrap(),
        }
    }
}

fn start(variables: &[(&str, &str)], prefix: &str) -> Process {
    let mut process = Process::start("processes::child", variables);
    process.says(prefix);
    process
}

fn start_arbiter(addr: SocketAddr, log: &Path) -> Process {
    start(&[(ADDR, &addr.to_string()), (ARBITER, log.to_str().unwrap())], "serving")
}

fn start_worker(addr: SocketAddr, id: u64) -> Process {
    start(&[(ADDR, &addr.to_string()), (WORKER, &id.to_string())], "joined")
}

/// Starts a worker with this deadline.
fn start_waiting_worker(addr: SocketAddr, id: u64, deadline: Duration) -> Process {
    let [addr, id, secs] = [addr.to_string(), id.to_string(), deadline.as_secs().to_string()];
    start(&[(ADDR, &*addr), (WORKER, &*id), (WAITS, &*secs)], "joined")
}

const ANSWERS: [&str; 4] = ["granted", "commit", "abort", "error"];

/// Gives an order to some workers, and returns each one's answer.
fn all(workers: &mut [Process], who: &[usize], order: &str) -> Vec<String> {
    who.iter().for_each(|&i| workers[i].order(order));
    let begin = Instant::now();
    let said = who.iter().map(|&i| workers[i].says_one_of(&ANSWERS)).collect();
    assert!(begin.elapsed() < BOUND, "{order}: {:?}", begin.elapsed());
    said
}

/// Starts an arbiter and three workers, and runs one exchange.
fn three(log: &Path) -> (SocketAddr, Process, Vec<Process>) {
    let addr = free_addr();
    let arbiter = start_arbiter(addr, log);
    let mut workers: Vec<Process> = (0..3).map(|id| start_worker(addr, id)).collect();
    assert_eq!(all(&mut workers, &[0, 1, 2], "boundary 4"), ["granted step 4 epoch 1 of [0, 1, 2] by 3"; 3]);
    assert_eq!(all(&mut workers, &[0, 1, 2], "vote ready"), ["commit"; 3]);
    (addr, arbiter, workers)
}

#[test]
fn survivors_of_a_killed_worker_go_on_and_its_successor_joins_them() {
    let dir = tempfile::tempdir().unwrap();
    let (addr, _arbiter, mut workers) = three(&dir.path().join("log"));
    assert_eq!(all(&mut workers, &[0, 1, 2], "boundary 8").len(), 3);
    // Killed before its vote.
    workers[1].kill();
    let lost = "abort Abort { vetoed: [], failed: [], lost: [1] }";
    assert_eq!(all(&mut workers, &[0, 2], "vote ready"), [lost; 2]);
    assert_eq!(all(&mut workers, &[0, 2], "boundary 8"), ["granted step 8 epoch 2 of [0, 2] by 2"; 2]);
    assert_eq!(all(&mut workers, &[0, 2], "vote ready"), ["commit"; 2]);
    // The successor is admitted at the first boundary of the others after it has joined.
    workers[1] = start_worker(addr, 1);
    workers[1].order("boundary 0");
    let mut step = 12;
    loop {
        let said = all(&mut workers, &[0, 2], &format!("boundary {step}"));
        if said[0] == format!("granted step {step} epoch 3 of [0, 2, 1] by 2") {
            assert_eq!((&said[0], &workers[1].says("granted")), (&said[1], &said[0]));
            break;
        }
        assert_eq!(said, [format!("granted step {step} epoch 2 of [0, 2] by 2"), said[0].clone()]);
        assert_eq!(all(&mut workers, &[0, 2], "vote ready"), ["commit"; 2]);
        step += 4;
    }
    assert_eq!(all(&mut workers, &[0, 1, 2], "vote ready"), ["commit"; 3]);
    let next = format!("granted step {0} epoch 3 of [0, 2, 1] by 3", step + 4);
    assert_eq!(all(&mut workers, &[0, 1, 2], &format!("boundary {}", step + 4)), [&next[..]; 3]);
    workers.iter_mut().for_each(|worker| worker.order("leave now"));
    for mut worker in workers {
        assert!(worker.wait().success());
    }
}

/// A stopped machine closes no connection.
#[test]
fn a_stopped_arbiter_is_noticed_before_its_silence_has_passed_twice() {
    let dir = tempfile::tempdir().unwrap();
    let addr = free_addr();
    let arbiter = start_arbiter(addr, &dir.path().join("log"));
    let worker = Remote::join(Caller { alone: 10, ..caller(addr, 0) }).unwrap();
    let round = worker.boundary(4).unwrap();
    assert!(worker.vote(&round, Ballot::Ready).unwrap().is_commit());
    arbiter.stop();
    let begin = Instant::now();
    assert_eq!(worker.boundary(8), Err(Error::Alone { step: 8, left: 6 }));
    assert!(begin.elapsed() < 2 * quick().silence + Duration::from_secs(1), "{:?}", begin.elapsed());
    arbiter.signal("-CONT");
    // The worker calls again within a moment.
    while worker.boundary(12) == Err(Error::Alone { step: 12, left: 2 }) {
        assert!(begin.elapsed() < BOUND);
        std::thread::sleep(Duration::from_millis(20));
    }
    worker.leave().unwrap();
}

/// The socket closes as the worker dies, so neither the others nor the successor with the same id wait for the minute of silence.
#[test]
fn a_killed_worker_is_missed_and_replaced_in_a_moment() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        Config { silence: Duration::from_secs(60), patience: Duration::from_secs(120), ..config(3, 1) };
    let service = serve(free_addr(), config, &dir.path().join("log"));
    let addr = service.addr();
    let mut workers: Vec<Process> = (0..3).map(|id| start_worker(addr, id)).collect();
    all(&mut workers, &[0, 1, 2], "boundary 0");
    all(&mut workers, &[0, 1, 2], "vote 0");
    workers[1].kill();
    let killed = Instant::now();
    for told in all(&mut workers, &[0, 2], "boundary 1") {
        assert!(told.contains("of [0, 2] by 2"), "{told}");
    }
    assert_eq!(all(&mut workers, &[0, 2], "vote 1"), ["commit", "commit"]);
    let committed = killed.elapsed();
    let begun = Instant::now();
    workers[2].kill();
    workers[2] = start_worker(addr, 2);
    let back = begun.elapsed();
    println!("the others committed after {committed:?}, the same id was back after {back:?}");
    assert!(committed < BOUND && back < BOUND, "{committed:?}, {back:?}");
    // Worker 0 does not wait for a joiner, so its exchanges go on alone until the joiner's request has arrived.
    workers[2].order("boundary 2");
    for step in 2.. {
        let granted = all(&mut workers, &[0], &format!("boundary {step}"));
        if granted[0].contains("of [0, 2] by 1") {
            break;
        }
        assert!(granted[0].contains("of [0] by 1") && begun.elapsed() < BOUND, "{granted:?}");
        assert_eq!(all(&mut workers, &[0], &format!("vote {step}")), ["commit"]);
    }
    let granted = workers[2].says_one_of(&ANSWERS);
    assert!(granted.contains("of [0, 2] by 1"), "{granted}");
}

#[test]
fn a_worker_that_was_stopped_learns_that_it_is_fenced_whatever_it_was_about_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let (_, _arbiter, mut workers) = three(&dir.path().join("log"));
    // Stopped before its vote.
    assert_eq!(all(&mut workers, &[0, 1, 2], "boundary 8").len(), 3);
    workers[1].stop();
    workers[1].order("vote ready");
    let lost = "abort Abort { vetoed: [], failed: [], lost: [1] }";
    assert_eq!(all(&mut workers, &[0, 2], "vote ready"), [lost; 2]);
    workers[1].signal("-CONT");
    let fenced = workers[1].says_one_of(&ANSWERS);
    assert!(fenced.contains("up to epoch 1") && fenced.contains("no message came from it"), "{fenced}");
    // Stopped after its vote, during which the exchange is committed: by the time it continues, its lease has ended.
    assert_eq!(all(&mut workers, &[0, 2], "boundary 8"), ["granted step 8 epoch 2 of [0, 2] by 2"; 2]);
    workers[2].order("vote ready");
    std::thread::sleep(Duration::from_millis(200)); // there is no sign that its vote has arrived
    workers[2].stop();
    assert_eq!(all(&mut workers, &[0], "vote ready"), ["commit"]);
    // The other worker waits for it at the boundary, and continues alone.
    assert_eq!(all(&mut workers, &[0], "boundary 12"), ["granted step 12 epoch 3 of [0] by 1"]);
    assert_eq!(all(&mut workers, &[0], "vote ready"), ["commit"]);
    workers[2].signal("-CONT");
    let fenced = workers[2].says_one_of(&ANSWERS);
    assert!(fenced.starts_with("error") && fenced.contains("not one in epoch 3"), "{fenced}");
}

#[test]
fn one_that_is_stopped_for_a_moment_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (_, arbiter, mut workers) = three(&dir.path().join("log"));
    workers[1].stop();
    (0..3).for_each(|i| workers[i].order("boundary 8"));
    workers[1].signal("-CONT");
    for worker in &mut workers {
        assert_eq!(worker.says_one_of(&ANSWERS), "granted step 8 epoch 1 of [0, 1, 2] by 3");
    }
    // The arbiter is stopped for longer than the silence, and drops no worker because of that.
    arbiter.stop();
    (0..3).for_each(|i| workers[i].order("vote ready"));
    let begin = Instant::now();
    let most = if long() { 2 * quick().silence } else { 3 * quick().silence / 2 };
    while begin.elapsed() < most {
        std::thread::sleep(Duration::from_millis(100)); // a silence takes real time
    }
    arbiter.signal("-CONT");
    for worker in &mut workers {
        assert_eq!(worker.says_one_of(&ANSWERS), "commit");
    }
    assert_eq!(
        all(&mut workers, &[0, 1, 2], "boundary 12"),
        ["granted step 12 epoch 1 of [0, 1, 2] by 3"; 3]
    );
}

#[test]
fn an_arbiter_that_is_killed_is_followed_by_one_that_says_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let (addr, mut arbiter, mut workers) = three(&log);
    for i in 2..5u64 {
        // The arbiter is killed while some workers wait at the boundary, and while some have voted.
        workers[0].order(&format!("boundary {}", 4 * i));
        workers[2].order(&format!("boundary {}", 4 * i));
        arbiter.kill();
        arbiter = start_arbiter(addr, &log);
        workers[1].order(&format!("boundary {}", 4 * i));
        for worker in &mut workers {
            assert_eq!(
                worker.says_one_of(&ANSWERS),
                format!("granted step {} epoch 1 of [0, 1, 2] by 3", 4 * i)
            );
        }
        workers[0].order("vote ready");
        arbiter.kill();
        arbiter = start_arbiter(addr, &log);
        workers[1].order("vote ready");
        workers[2].order("vote ready");
        for worker in &mut workers {
            assert_eq!(worker.says_one_of(&ANSWERS), "commit");
        }
    }
    // Without an arbiter a request ends at its deadline. In a short run the request is that of a new worker with a short deadline.
    let deadline = if long() { DEADLINE } else { Duration::from_secs(3) };
    let mut asks = if long() { workers.remove(0) } else { start_waiting_worker(addr, 3, deadline) };
    arbiter.kill();
    let begin = Instant::now();
    asks.order("boundary 99");
    assert!(asks.says_one_of(&ANSWERS).starts_with("error no answer to a boundary"));
    assert!((deadline..deadline + BOUND).contains(&begin.elapsed()));
}
