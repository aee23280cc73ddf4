//! Elastic workers as processes over comm::tcp: workers that are killed, stopped and started, and arbiters that are killed, started
//! again on their log, or followed by a standby. `MESHSTEP_SEED=n` runs one schedule.

mod arbiters;
mod run;
mod told;
mod worker;

use meshstep_cases::seeds::seeds;
use meshstep_cases::{cases, hash};
use meshstep_comm::rendezvous::Token;
use meshstep_local::LocalPlan;
use meshstep_membership::{Config, Digest};
use run::Run;
use std::thread::sleep;
use std::time::Duration;
use told::{Line, now};

/// Longest silence of a worker, wait for other workers, and wait in an exchange.
const DEADLINE: Duration = Duration::from_secs(2);
/// Longest wait for an answer of the arbiter.
const ANSWER: Duration = Duration::from_secs(15);
/// Bound on the time from a worker's death to the others' next exchange.
const BOUND: Duration = Duration::from_secs(5);
/// Steps that a worker may take without an arbiter.
const ALONE: u64 = 4000;
/// Length of the parameters.
const LEN: usize = 1000;
/// Plans of the runs: Local Adam and DES-LOC.
const PLANS: [fn() -> LocalPlan; 2] = [|| LocalPlan::local_adam(4), || LocalPlan::des_loc(4, 8, 16)];
/// Number of workers with which a run begins.
const WORKERS: u64 = 4;

fn token() -> Token {
    Token::from_hex("000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f").unwrap()
}

fn config(digest: Digest) -> Config {
    let (silence, patience) = (DEADLINE, DEADLINE);
    Config { min_workers: 1, silence, patience, ..Config::new(digest, WORKERS as usize) }
}

/// Child process; does nothing in a normal test run.
#[test]
fn child() {
    worker::run();
}

/// Random numbers of a schedule.
struct Schedule {
    seed: u64,
    drawn: u64,
}

impl Schedule {
    fn below(&mut self, n: u64) -> u64 {
        self.drawn += 1;
        hash(&[self.seed, self.drawn]) % n
    }

    fn pause(&mut self, most: u64) {
        sleep(Duration::from_millis(self.below(most))); // the schedule's
    }
}

/// Starts a run with all its workers, and waits for their first exchanges.
fn begin(plan: usize, addrs: usize) -> (Run, meshstep_cases::process::Process) {
    let mut run = Run::new(plan, addrs);
    let arbiter = run.arbiter(0, "log", false);
    (0..WORKERS).for_each(|id| run.worker(id));
    run.all_committed(0..WORKERS, Duration::ZERO, |members| members.len() == 4);
    (run, arbiter)
}

/// Kills a worker at a random moment while another joins; then, by the seed, stops one past its deadline, and kills the arbiter.
fn schedule(seed: u64) {
    let mut random = Schedule { seed, drawn: 0 };
    let (mut run, mut arbiter) = begin((seed % 2) as usize, 1);
    random.pause(700);
    let victim = random.below(WORKERS);
    let early = random.below(2) == 0;
    if early {
        run.worker(WORKERS);
        random.pause(300);
    }
    run.workers.remove(&victim).unwrap().kill();
    let killed = now();
    if !early {
        random.pause(500);
        run.worker(WORKERS);
    }
    let others: Vec<u64> = (0..WORKERS).filter(|id| *id != victim).collect();
    let without = |members: &[u64]| !members.contains(&victim);
    let committed = run.all_committed(others.clone(), killed, without);
    let took = committed.saturating_sub(killed);
    println!("seed {seed}: worker {victim} killed, the others' next exchange committed after {took:?}");
    assert!(took < BOUND, "seed {seed}: {took:?}");
    run.committed(WORKERS, killed, |members| members.len() == 4);
    if seed % 4 >= 2 {
        stop_one(&run, &mut random, &others);
    }
    if seed % 4 % 2 == 1 {
        let down = kill_arbiter(&run, &mut random, &mut arbiter);
        println!("seed {seed}: the arbiter was away for {down:?}");
    }
    run.end();
}

/// Stops a worker for longer than anybody waits. It joins again, and the others go on meanwhile.
fn stop_one(run: &Run, random: &mut Schedule, of: &[u64]) {
    random.pause(400);
    let id = of[random.below(of.len() as u64) as usize];
    run.workers[&id].stop();
    let stopped = now();
    let without = |members: &[u64]| !members.contains(&id);
    let other = of.iter().find(|other| **other != id).unwrap();
    run.committed(*other, stopped, without);
    random.pause(1500);
    let continued = now();
    run.workers[&id].signal("-CONT");
    run.until(id, continued, "end of its membership", |line| matches!(line, Line::Again(_)));
    run.committed(id, continued, |members| members.len() == 4);
}

/// Kills the arbiter, and starts it again on its log. Returns how long it was away.
fn kill_arbiter(
    run: &Run,
    random: &mut Schedule,
    arbiter: &mut meshstep_cases::process::Process,
) -> Duration {
    random.pause(400);
    arbiter.kill();
    let killed = now();
    random.pause(4000);
    *arbiter = run.arbiter(0, "log", false);
    let back = now();
    run.all_committed(run.workers.keys().copied(), back, |members| members.len() == 4);
    back - killed
}

fn part(part: u64) {
    seeds(part, cases(3, 50)).into_iter().for_each(schedule);
}

mod schedules {
    meshstep_cases::ten_parts! { super::part }
}
