//! Worker processes that train and are killed or stopped: the survivors agree to the bit, and so does a worker that comes back.

mod wired;

use crate::common::long;
use crate::processes::wired::Wire;
use meshstep_cases::process::{Process, free_addr};
use meshstep_comm::rendezvous::Token;
use meshstep_comm::{Communicator, loopback};
use meshstep_local::{LocalError, LocalOptimizer, LocalPlan, LocalStep, Workers};
use meshstep_membership::{Caller, Config, Error, Remote, Round, Service};
use meshstep_optim::AdamW;
use meshstep_shard::{Optimizer, Options, Step, StepArgs};
use meshstep_tensor::{DType, Layout, Slice};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Set if this binary runs as a worker: its id, the arbiter's address, the address of the ranks' threads.
const WORKER: &str = "MESHSTEP_TEST_TRAINS";
const ARBITER: &str = "MESHSTEP_TEST_TRAINS_AT";
const RANKS: &str = "MESHSTEP_TEST_TRAINS_WITH";

/// Time that a worker waits for an answer of the arbiter.
const DEADLINE: Duration = Duration::from_secs(12);
const LEN: usize = 1000;
const PLAN: fn() -> LocalPlan = || LocalPlan::local_adam(4);
/// Longest time of an exchange on a busy machine, the arbiter's patience included.
const BOUND: Duration = Duration::from_secs(25);

fn token() -> Token {
    Token::from_hex("000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f").unwrap()
}

fn serve(addr: SocketAddr, config: Config, log: &Path) -> Service {
    Service::start(addr, Some(&token()), "run", config, log).unwrap()
}

/// Two seconds of silence and four of patience.
fn quick() -> Config {
    let (silence, patience) = (Duration::from_secs(2), Duration::from_secs(4));
    Config { min_workers: 1, silence, patience, ..Config::new(PLAN().digest(&optimizer()), 3) }
}

/// Mixes the bits of two numbers.
fn mix(a: u64, b: u64) -> u64 {
    let x = (a.rotate_left(23) ^ b).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ x >> 32
}

fn optimizer() -> Optimizer {
    let comm = loopback::world(loopback::Config::new(1)).unwrap().remove(0);
    let layout = Layout::builder().param("x", &[LEN], DType::F32).build().unwrap();
    let first: Vec<f32> = (0..LEN).map(|i| (i as f32).sin()).collect();
    let first = |_: &_, mut x: meshstep_tensor::SliceMut<'_>| x.copy_from(Slice::from(&first[..]));
    Optimizer::new(comm, layout, AdamW::default(), first, Options::default()).unwrap()
}

fn gradient(id: u64, step: u64) -> Vec<f32> {
    (0..LEN as u64).map(|i| ((i * 31 + id * 17 + step * 7) % 101) as f32 / 50.0 - 1.0).collect()
}

/// Digest of the exchanged values.
fn digest(local: &LocalOptimizer) -> u64 {
    let state = local.state("x").unwrap();
    let moments = state.slots.iter().map(|(_, slot)| slot.bytes().unwrap());
    let bytes = std::iter::once(local.param("x").unwrap().bytes().unwrap()).chain(moments).flatten();
    bytes.fold(7, |sum, byte| mix(sum, u64::from(*byte)))
}

/// Takes a step of worker `id`.
fn step(local: &mut LocalOptimizer, id: u64) -> Result<LocalStep, LocalError> {
    let grad = gradient(id, local.steps());
    let mb = local.micro_batch(1)?;
    mb.grad("x", &grad[..])?;
    mb.finish()?;
    local.step(StepArgs { lr: 0.01, ..StepArgs::default() })
}

/// Returns the digest of worker `id` after `steps` steps with one exchange of three workers, after the fourth step.
fn apart(id: u64, steps: u64) -> u64 {
    let once = PLAN().with(|f| f.timing.during = 0..5);
    let all = loopback::spawn(3, |world| {
        let id = world.rank() as u64;
        let workers = Workers { across: Arc::clone(&world), world };
        let mut local = LocalOptimizer::new(optimizer(), workers, once.clone()).unwrap();
        (0..steps).for_each(|_| drop(step(&mut local, id).unwrap()));
        digest(&local)
    });
    all.unwrap()[id as usize]
}

/// Child process: executes orders from its standard input, line by line. In a normal test run it does nothing.
#[test]
fn child() {
    let variable = |name: &str| std::env::var(name).ok();
    let Some(id) = variable(WORKER) else { return };
    let id: u64 = id.parse().unwrap();
    let [arbiter, ranks] =
        [ARBITER, RANKS].map(|name| variable(name).unwrap().parse::<SocketAddr>().unwrap());
    let connect = |round: &Round| -> Result<Workers, Error> {
        let wire = Wire::connect(ranks, round.epoch, round.members.len(), round.rank).unwrap();
        let world: Arc<dyn Communicator> = Arc::new(wire);
        Ok(Workers { across: Arc::clone(&world), world })
    };
    let mut orders = std::io::stdin().lines().map(Result::unwrap);
    loop {
        let inner = optimizer();
        let (digest_of_run, contact) = (PLAN().digest(&inner), format!("at {id}"));
        let caller = Caller {
            addrs: vec![arbiter],
            token: Some(token()),
            run: "run".to_owned(),
            id,
            digest: digest_of_run,
            contact,
            deadline: DEADLINE,
            alone: 0,
        };
        let member = Remote::join(caller).unwrap();
        println!("\nmember");
        let mut local = LocalOptimizer::join(inner, PLAN(), Arc::new(member), connect).unwrap();
        println!("\njoined at {} with {:016x}", local.steps(), digest(&local));
        let error = loop {
            let Some(order) = orders.next() else { return };
            if let Err(error) = go_on(&mut local, id, &order, &mut orders, connect) {
                break error;
            }
        };
        println!("\nended at {} with {:016x}: {error}", local.steps(), digest(&local));
        // The worker joins again after the next order.
        if orders.next().is_none() {
            return;
        }
    }
}

/// Takes steps up to and including the next exchange. For the order `between` it waits for a line between two exchanges, for
/// `within` as soon as the exchange is granted.
#[allow(clippy::print_stdout, reason = "the parent test reads the output")]
fn go_on(
    local: &mut LocalOptimizer,
    id: u64,
    order: &str,
    orders: &mut impl Iterator<Item = String>,
    connect: impl Fn(&Round) -> Result<Workers, Error>,
) -> Result<(), LocalError> {
    let mut ids: Vec<u64> = Vec::new();
    loop {
        if let Some(round) = local.follow(&connect)? {
            ids = round.members.iter().map(|seat| seat.id).collect();
            ids.sort_unstable();
        }
        if local.steps() % 4 == if order == "between" { 2 } else { 3 } && order != "go" {
            println!("\n{order} exchanges");
            orders.next();
        }
        let told = step(local, id)?;
        if local.steps().is_multiple_of(4) {
            let merged = told.exchanged.merged.len();
            println!("\nat {} of {ids:?} merged {merged}: {:016x}", local.steps(), digest(local));
            return Ok(());
        }
    }
}

fn start(addresses: [SocketAddr; 2], id: u64) -> Process {
    let [arbiter, ranks] = addresses.map(|addr| addr.to_string());
    Process::start("processes::child", &[(WORKER, &id.to_string()), (ARBITER, &arbiter), (RANKS, &ranks)])
}

/// Lets some workers continue to their next exchange, and returns each one's output.
fn go(workers: &mut [Process], who: &[usize]) -> Vec<String> {
    who.iter().for_each(|&i| workers[i].order("go"));
    let begin = Instant::now();
    let said = who.iter().map(|&i| workers[i].says("at ")).collect();
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    said
}

/// Returns true if all lines are equal and begin with `of`.
fn agree(said: &[String], of: &str) -> bool {
    said.iter().all(|line| *line == said[0]) && said[0].starts_with(of)
}

/// Starts three workers and runs one exchange; returns them with the addresses and the arbiter.
fn three(config: Config, log: &Path) -> (Vec<Process>, [SocketAddr; 2], Service) {
    let config = Config { digest: Some(PLAN().digest(&optimizer())), ..config };
    let service = serve(free_addr(), config, log);
    let addresses = [service.addr(), wired::serve(free_addr())];
    let mut workers: Vec<Process> = (0..3).map(|id| start(addresses, id)).collect();
    let joined: Vec<String> = workers.iter_mut().map(|worker| worker.says("joined")).collect();
    assert!(agree(&joined, "joined at 0"), "{joined:?}");
    let said = go(&mut workers, &[0, 1, 2]);
    assert!(agree(&said, "at 4 of [0, 1, 2] merged 3"), "{said:?}");
    (workers, addresses, service)
}

/// Runs workers 0 and 2 from step `at` until worker `id` takes part, and returns that step.
fn until_it_comes(workers: &mut [Process], id: u64, mut at: u64) -> u64 {
    let mut ids = [0, 2, id];
    ids.sort_unstable();
    workers[1].order("go");
    loop {
        at += 4;
        let mut said = go(workers, &[0, 2]);
        if said[0].contains(&format!("{ids:?}")) {
            said.push(workers[1].says("at "));
            assert!(agree(&said, &format!("at {at} of {ids:?} merged 3")), "{said:?}");
            return at;
        }
        assert!(agree(&said, &format!("at {at} of [0, 2] merged 3")), "{said:?}");
    }
}

#[test]
fn those_left_of_processes_that_train_agree_and_so_does_one_that_joins_them() {
    let dir = tempfile::tempdir().unwrap();
    let (mut workers, addresses, _service) = three(quick(), &dir.path().join("log"));
    // A worker is killed while the others wait for its contribution: the exchange is aborted, and the workers drift apart once.
    workers[1].order("within");
    [0, 2].iter().for_each(|&i| workers[i].order("go"));
    workers[1].says("within");
    workers[1].kill();
    let begin = Instant::now();
    let said = [0, 2].map(|i| workers[i].says("at "));
    assert!(said.iter().all(|line| line.starts_with("at 8 of [0, 1, 2] merged 0")), "{said:?}");
    assert!(said[0] != said[1] && begin.elapsed() < BOUND, "{said:?}");
    let said = go(&mut workers, &[0, 2]);
    assert!(agree(&said, "at 12 of [0, 2] merged 3"), "{said:?}");
    workers[1] = start(addresses, 3);
    let at = until_it_comes(&mut workers, 3, 12);
    let before = go(&mut workers, &[0, 1, 2]);
    assert!(agree(&before, &format!("at {} of [0, 2, 3] merged 3", at + 4)), "{before:?}");
    // A worker is killed between two exchanges, which costs no exchange.
    workers[0].kill();
    let said = go(&mut workers, &[1, 2]);
    assert!(agree(&said, &format!("at {} of [2, 3] merged 3", at + 8)) && said[0] != before[0], "{said:?}");
}

/// Stops a worker for longer than the arbiter waits, continues it, and lets it join again.
fn stopped_for_long(where_: &str) {
    let dir = tempfile::tempdir().unwrap();
    let (mut workers, _, _service) = three(quick(), &dir.path().join("log"));
    let within = where_ == "within";
    workers[1].order(where_);
    if within {
        [0, 2].iter().for_each(|&i| workers[i].order("go"));
    }
    workers[1].says(where_);
    workers[1].stop();
    // Order that the worker executes once it continues.
    workers[1].order("on");
    if within {
        let begin = Instant::now();
        let said = [0, 2].map(|i| workers[i].says("at "));
        assert!(said.iter().all(|line| line.starts_with("at 8 of [0, 1, 2] merged 0")), "{said:?}");
        assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
        for (said, id) in said.iter().zip([0, 2]) {
            assert!(said.ends_with(&format!("{:016x}", apart(id, 8))), "{said}");
        }
    } else {
        let said = go(&mut workers, &[0, 2]);
        assert!(agree(&said, "at 8 of [0, 2] merged 3"), "{said:?}");
    }
    let said = go(&mut workers, &[0, 2]);
    assert!(agree(&said, "at 12 of [0, 2] merged 3"), "{said:?}");
    // The worker is refused, and holds the result of its own steps since its last exchange.
    workers[1].signal("-CONT");
    let (ended, steps) = (workers[1].says("ended"), if within { 8 } else { 7 });
    assert!(ended.starts_with(&format!("ended at {steps} with {:016x}: ", apart(1, steps))), "{ended}");
    let fenced = "up to epoch 1 and is not one in epoch 2 because no message came from it";
    assert!(ended.contains(fenced), "{ended}");
    workers[1].order("join");
    let at = until_it_comes(&mut workers, 1, 12);
    let said = go(&mut workers, &[0, 1, 2]);
    assert!(agree(&said, &format!("at {} of [0, 1, 2] merged 3", at + 4)), "{said:?}");
}

#[test]
fn one_that_was_stopped_between_exchanges_is_refused_and_joins_anew() {
    stopped_for_long("between");
}

#[test]
fn one_that_was_stopped_within_an_exchange_applies_nothing_of_it_and_joins_anew() {
    stopped_for_long("within");
}

#[test]
fn one_that_is_stopped_for_less_than_anybody_waits_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { silence: DEADLINE, patience: 2 * DEADLINE, ..quick() };
    let (mut workers, _, _service) = three(config, &dir.path().join("log"));
    let pause = Duration::from_millis(if long() { 2000 } else { 500 });
    for (where_, at) in [("between", 8), ("within", 12)] {
        workers[1].order(where_);
        if where_ == "within" {
            [0, 2].iter().for_each(|&i| workers[i].order("go"));
        }
        workers[1].says(where_);
        workers[1].stop();
        if where_ == "between" {
            [0, 2].iter().for_each(|&i| workers[i].order("go"));
        }
        workers[1].order("on");
        std::thread::sleep(pause); // there is no sign that the others wait
        workers[1].signal("-CONT");
        let said: Vec<String> = workers.iter_mut().map(|worker| worker.says("at ")).collect();
        assert!(agree(&said, &format!("at {at} of [0, 1, 2] merged 3")), "{said:?}");
    }
}
