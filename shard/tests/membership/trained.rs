//! Workers that are processes, train, and are killed: those that are left agree to the bit.

use crate::processes::{DEADLINE, Process, quick};
use crate::remote::{caller, free_addr, serve};
use crate::wired::{self, Wire};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_shard::local::membership::{Caller, Config, Error, Remote, Round};
use meshstep_shard::local::{LocalOptimizer, LocalPlan, Workers};
use meshstep_shard::{At, Optimizer, Options};
use meshstep_tensor::{DType, Layout, Slice};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Set where this binary runs as a worker: its id, the arbiter's address, that of the ranks' threads.
const WORKER: &str = "MESHSTEP_TEST_TRAINS";
const ARBITER: &str = "MESHSTEP_TEST_TRAINS_AT";
const RANKS: &str = "MESHSTEP_TEST_TRAINS_WITH";

const LEN: usize = 1000;
const PLAN: fn() -> LocalPlan = || LocalPlan::local_adam(4);
/// As long as an exchange may take on a busy machine, the arbiter's patience included.
const BOUND: Duration = Duration::from_secs(25);

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

/// All that is exchanged, as one number.
fn digest(local: &LocalOptimizer) -> u64 {
    let state = local.state("x").unwrap();
    let moments = state.slots.iter().map(|(_, slot)| slot.bytes().unwrap());
    let bytes = std::iter::once(local.param("x").unwrap().bytes().unwrap()).chain(moments).flatten();
    bytes.fold(7, |sum, byte| crate::training::mix(sum, u64::from(*byte)))
}

/// What a child does, a line at a time, as it is told. In a run of tests it does nothing.
#[test]
fn child() {
    let variable = |name: &str| std::env::var(name).ok();
    let Some(id) = variable(WORKER) else { return };
    let id: u64 = id.parse().unwrap();
    let [arbiter, ranks] =
        [ARBITER, RANKS].map(|name| variable(name).unwrap().parse::<SocketAddr>().unwrap());
    let inner = optimizer();
    let digest_of_run = PLAN().digest(&inner);
    let member =
        Remote::join(Caller { deadline: DEADLINE, digest: digest_of_run, ..caller(arbiter, id) }).unwrap();
    println!("\nmember");
    let connect = |round: &Round| -> Result<Workers, Error> {
        let wire = Wire::connect(ranks, round.epoch, round.members.len(), round.rank).unwrap();
        let world: Arc<dyn Communicator> = Arc::new(wire);
        Ok(Workers { across: Arc::clone(&world), world })
    };
    let mut local = LocalOptimizer::join(inner, PLAN(), Arc::new(member), connect).unwrap();
    println!("\njoined at {} with {:016x}", local.steps(), digest(&local));
    for order in std::io::stdin().lines() {
        let mut ids: Vec<u64> = Vec::new();
        // To the next exchange, or up to its midst.
        loop {
            if let Some(round) = local.follow(connect).unwrap() {
                ids = round.members.iter().map(|seat| seat.id).collect();
                ids.sort_unstable();
            }
            if local.steps() % 4 == 3 && order.as_ref().unwrap() == "midst" {
                println!("\nin the midst");
                std::thread::sleep(Duration::from_secs(600)); // it is killed
            }
            let grad = gradient(id, local.steps());
            let mb = local.micro_batch(1).unwrap();
            mb.grad("x", &grad[..]).unwrap();
            mb.finish().unwrap();
            let told = local.step(At { lr: 0.01, ..At::default() }).unwrap();
            if local.steps() % 4 == 0 {
                let merged = told.exchanged.merged.len();
                println!("\nat {} of {ids:?} merged {merged}: {:016x}", local.steps(), digest(&local));
                break;
            }
        }
    }
}

fn start(addresses: [SocketAddr; 2], id: u64) -> Process {
    let [arbiter, ranks] = addresses.map(|addr| addr.to_string());
    Process::start("trained::child", &[(WORKER, &id.to_string()), (ARBITER, &arbiter), (RANKS, &ranks)])
}

/// Has some go on to their next exchange: what each says of it.
fn go(workers: &mut [Process], who: &[usize]) -> Vec<String> {
    who.iter().for_each(|&i| workers[i].order("go"));
    let begin = Instant::now();
    let said = who.iter().map(|&i| workers[i].says("at ")).collect();
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    said
}

/// Whether all say the same, of this exchange.
fn agree(said: &[String], of: &str) -> bool {
    said.iter().all(|line| *line == said[0]) && said[0].starts_with(of)
}

#[test]
fn those_left_of_processes_that_train_agree_and_so_does_one_that_joins_them() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { digest: PLAN().digest(&optimizer()), ..quick() };
    let service = serve(free_addr(), config, &dir.path().join("log"));
    let addresses = [service.addr(), wired::serve(free_addr())];
    let mut workers: Vec<Process> = (0..3).map(|id| start(addresses, id)).collect();
    let joined: Vec<String> = workers.iter_mut().map(|worker| worker.says("joined")).collect();
    assert!(agree(&joined, "joined at 0"), "{joined:?}");
    let said = go(&mut workers, &[0, 1, 2]);
    assert!(agree(&said, "at 4 of [0, 1, 2] merged 3"), "{said:?}");
    // One is killed when the others wait for what it brings: nothing is applied, and they drift apart once.
    workers[1].order("midst");
    [0, 2].iter().for_each(|&i| workers[i].order("go"));
    workers[1].says("in the midst");
    workers[1].kill();
    let begin = Instant::now();
    let said = [0, 2].map(|i| workers[i].says("at "));
    assert!(said.iter().all(|line| line.starts_with("at 8 of [0, 1, 2] merged 0")), "{said:?}");
    assert!(said[0] != said[1] && begin.elapsed() < BOUND, "{said:?}");
    let said = go(&mut workers, &[0, 2]);
    assert!(agree(&said, "at 12 of [0, 2] merged 3"), "{said:?}");
    // Another comes, at the first boundary after it has called.
    workers[1] = start(addresses, 3);
    workers[1].order("go");
    let mut at = 16;
    loop {
        let mut said = go(&mut workers, &[0, 2]);
        if said[0].contains("[0, 2, 3]") {
            said.push(workers[1].says("at "));
            assert!(agree(&said, &format!("at {at} of [0, 2, 3] merged 3")), "{said:?}");
            break;
        }
        assert!(agree(&said, &format!("at {at} of [0, 2] merged 3")), "{said:?}");
        at += 4;
    }
    let before = go(&mut workers, &[0, 1, 2]);
    assert!(agree(&before, &format!("at {} of [0, 2, 3] merged 3", at + 4)), "{before:?}");
    // One is killed between two exchanges, which costs nothing.
    workers[0].kill();
    let said = go(&mut workers, &[1, 2]);
    assert!(agree(&said, &format!("at {} of [2, 3] merged 3", at + 8)) && said[0] != before[0], "{said:?}");
}
