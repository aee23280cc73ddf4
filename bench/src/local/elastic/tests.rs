//! Workers that call a real arbiter over TCP and exchange over loopback: equality with threads, changes of members, a silent arbiter.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Condvar, Mutex};
use std::thread;

use clap::Parser as _;

use meshstep_comm::{Communicator, loopback};
use meshstep_membership::{Ballot, Config, Decision, Round, Service};

use super::*;
use crate::local::tests;

/// Communicators of an epoch by rank, until they are taken.
type Seats = Vec<Option<Arc<dyn Communicator>>>;

/// Communicators by epoch.
#[derive(Default)]
struct Worlds {
    worlds: Mutex<BTreeMap<u64, Seats>>,
}

impl Worlds {
    fn connect(&self, round: &Round) -> Result<Arc<dyn Communicator>, MembershipError> {
        let config = loopback::Config::new(round.members.len());
        let make = || loopback::world(config).unwrap().into_iter().map(Some).collect();
        let mut worlds = self.worlds.lock().unwrap();
        Ok(worlds.entry(round.epoch).or_insert_with(make)[round.rank].take().unwrap())
    }
}

/// A state that only grows, and that threads wait for.
#[derive(Default)]
struct Stage {
    reached: Mutex<u64>,
    changed: Condvar,
}

impl Stage {
    fn reach(&self, stage: u64) {
        let mut reached = self.reached.lock().unwrap();
        *reached = stage.max(*reached);
        self.changed.notify_all();
    }

    fn wait_for(&self, stage: u64) {
        let reached = self.reached.lock().unwrap();
        drop(self.changed.wait_while(reached, |reached| *reached < stage).unwrap());
    }
}

/// Starts the arbiter of a run on its log.
fn serve(run: &Run, log: &Path, addr: &str) -> Service {
    let config = Config::new(None, run.asked.ranks());
    Service::start(addr.parse().unwrap(), None, run.asked.local.run(), config, log).unwrap()
}

fn member(addr: SocketAddr, id: u64, digest: Digest) -> Result<Remote, MembershipError> {
    let (run, contact, deadline) = ("train".to_owned(), String::new(), ANSWER);
    Remote::join(Caller { addrs: vec![addr], token: None, run, id, digest, contact, deadline, alone: 0 })
}

/// Trains one worker that calls the arbiter at `addr` when worker `worker - 1` has joined: ranks are in the order of joining.
fn worker(run: &Run, addr: SocketAddr, worker: u64, joined: &Stage, connect: &Connect<'_>) -> Report {
    let join = |digest| {
        joined.wait_for(worker);
        let member = member(addr, worker, digest);
        joined.reach(worker + 1);
        Ok(Arc::new(member?) as Arc<dyn Membership>)
    };
    train(run, &Elastic { worker, join: &join, connect }).unwrap()
}

/// Trains workers 0, 1 and 2.
fn three(run: &(impl Fn() -> Run + Sync), addr: SocketAddr) -> Vec<Report> {
    let (worlds, joined) = (Worlds::default(), Stage::default());
    thread::scope(|scope| {
        let one = |id| {
            let (worlds, joined) = (&worlds, &joined);
            scope.spawn(move || worker(&run(), addr, id, joined, &|round| worlds.connect(round)))
        };
        [0, 1, 2].map(one).map(|thread| thread.join().unwrap()).into()
    })
}

/// Checks that the workers trained as threads of one program do.
fn assert_as_on_threads(reports: &[Report], run: Run) {
    let threads = run.train(&mut Vec::new()).unwrap().swap_remove(0);
    let lives: Vec<&Life> = reports.iter().map(|report| &report.lives[0]).collect();
    let mean = |step: usize| lives.iter().map(|life| life.losses[step]).sum::<f64>() / lives.len() as f64;
    let losses: Vec<u64> = (0..threads.steps).map(|step| mean(step).to_bits()).collect();
    assert_eq!(losses, threads.losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>());
    for (life, thread) in lives.iter().zip(&threads.workers) {
        assert_eq!((life.planned, life.epochs.len(), life.failed.len()), (thread.planned, 1, 0));
        assert_eq!(life.digest, lives[0].digest);
    }
}

#[test]
fn workers_with_an_arbiter_are_those_on_threads_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let run = || tests::run("--local des-loc --kx 2 --ku 4 --kv 4 --workers 3 --steps 8 --batch 1");
    let service = serve(&run(), &dir.path().join("log"), "127.0.0.1:0");
    assert_as_on_threads(&three(&run, service.addr()), run());
}

#[test]
fn workers_go_on_with_others_when_one_leaves_and_one_joins() {
    let dir = tempfile::tempdir().unwrap();
    let run = |steps: usize| {
        tests::run(&format!("--local local-adam --kx 1 --workers 3 --steps {steps} --batch 1"))
    };
    let service = serve(&run(40), &dir.path().join("log"), "127.0.0.1:0");
    let (addr, worlds, stage) = (service.addr(), Worlds::default(), Stage::default());
    let joined = &Stage::default();
    // Those that stay begin their second epoch, without worker 2, once worker 7 has joined.
    let connect = |round: &Round| {
        let has_joined = round.members.iter().any(|seat| seat.id == 7);
        if round.epoch > 1 && !has_joined {
            stage.reach(1);
            stage.wait_for(2);
        }
        worlds.connect(round)
    };
    let reports = thread::scope(|scope| {
        let stays = [0, 1].map(|id| scope.spawn(move || worker(&run(40), addr, id, joined, &connect)));
        let leaves = scope.spawn(|| worker(&run(4), addr, 2, joined, &connect));
        let joins = scope.spawn(|| {
            stage.wait_for(1); // an epoch without worker 2
            let join = |digest| {
                let joined = member(addr, 7, digest);
                stage.reach(2);
                Ok(Arc::new(joined?) as Arc<dyn Membership>)
            };
            train(&run(40), &Elastic { worker: 7, join: &join, connect: &connect }).unwrap()
        });
        assert_eq!(leaves.join().unwrap().lives[0].losses.len(), 4);
        stays.into_iter().chain([joins]).map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let ends: Vec<(u64, &str)> = reports
        .iter()
        .map(|report| (report.lives[0].began + report.lives[0].losses.len() as u64, &*report.lives[0].digest))
        .collect();
    assert_eq!((ends[0].0, ends[1], ends[2]), (40, ends[0], ends[0]));
    let members = |i: usize| reports[i].lives[0].epochs.last().unwrap().members.clone();
    assert_eq!((members(0), members(2)), (vec![0, 1, 7], vec![0, 1, 7]));
    assert!(reports[2].lives[0].began > 4 && reports[2].part == reports[1].part, "{:?}", reports[2]);
}

/// A membership that is refused as fenced at the boundary with this number: the arbiter took its worker for lost.
#[derive(Debug)]
struct Fenced {
    member: Mutex<Option<Remote>>,
    left: AtomicUsize,
}

impl Fenced {
    fn with<T>(&self, ask: impl FnOnce(&Remote) -> Result<T, MembershipError>) -> Result<T, MembershipError> {
        self.member.lock().unwrap().as_ref().map_or(Err(MembershipError::Left), ask)
    }
}

impl Membership for Fenced {
    fn boundary(&self, step: u64) -> Result<Round, MembershipError> {
        if self.left.fetch_sub(1, SeqCst) == 0 {
            drop(self.member.lock().unwrap().take());
            return Err(Refusal::Fenced { epoch: 1, now: 2, why: None }.into());
        }
        self.with(|member| member.boundary(step))
    }

    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, MembershipError> {
        self.with(|member| member.vote(round, ballot))
    }

    fn decided(&self, round: &Round) -> Option<Decision> {
        self.with(|member| Ok(member.decided(round))).ok().flatten()
    }

    fn leave(&self) -> Result<(), MembershipError> {
        self.with(Membership::leave)
    }

    fn deadline(&self) -> Option<Duration> {
        Some(ANSWER)
    }
}

#[test]
fn a_worker_that_was_taken_for_lost_joins_again_and_ends_with_the_others_values() {
    let dir = tempfile::tempdir().unwrap();
    let run = || tests::run("--local local-adam --kx 1 --workers 2 --steps 30 --batch 1");
    let service = serve(&run(), &dir.path().join("log"), "127.0.0.1:0");
    let (addr, worlds, joined) = (service.addr(), Worlds::default(), Stage::default());
    let connect = |round: &Round| {
        if round.members.len() == 1 {
            joined.wait_for(3); // worker 1 has joined again
        }
        worlds.connect(round)
    };
    let reports = thread::scope(|scope| {
        let stays = scope.spawn(|| worker(&run(), addr, 0, &joined, &connect));
        let is_lost = scope.spawn(|| {
            let times = AtomicUsize::new(0);
            let join = |digest| {
                joined.wait_for(1);
                let member = Mutex::new(Some(member(addr, 1, digest)?));
                let again = times.fetch_add(1, SeqCst) == 1;
                joined.reach(if again { 3 } else { 2 });
                let left = AtomicUsize::new(if again { usize::MAX } else { 4 });
                Ok(Arc::new(Fenced { member, left }) as Arc<dyn Membership>)
            };
            train(&run(), &Elastic { worker: 1, join: &join, connect: &connect }).unwrap()
        });
        [stays, is_lost].map(|thread| thread.join().unwrap())
    });
    let [first, second] = &reports[1].lives[..] else { panic!("{:?}", reports[1]) };
    assert!(first.ended.as_ref().is_some_and(|why| why.contains("join again")) && second.ended.is_none());
    assert_eq!((first.began, first.losses.len()), (0, 3));
    assert_eq!(
        (second.began + second.losses.len() as u64, &second.digest),
        (30, &reports[0].lives[0].digest)
    );
}

/// A membership whose arbiter does not answer from the boundary with this number on.
#[derive(Debug)]
struct Silent {
    member: Remote,
    left: AtomicUsize,
}

impl Membership for Silent {
    fn boundary(&self, step: u64) -> Result<Round, MembershipError> {
        let left = self.left.load(SeqCst);
        self.left.store(left.saturating_sub(1), SeqCst);
        match left {
            0 => Err(MembershipError::Unanswered { what: "a boundary", after: ANSWER }),
            _ => self.member.boundary(step),
        }
    }

    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, MembershipError> {
        self.member.vote(round, ballot)
    }

    fn decided(&self, round: &Round) -> Option<Decision> {
        self.member.decided(round)
    }

    fn leave(&self) -> Result<(), MembershipError> {
        self.member.leave()
    }

    fn deadline(&self) -> Option<Duration> {
        self.member.deadline()
    }
}

/// Trains one worker; its arbiter is silent from the fourth boundary on.
fn without_arbiter(steps: usize) -> Result<Report> {
    let dir = tempfile::tempdir()?;
    let run = tests::run(&format!("--local local-adam --kx 1 --workers 1 --steps {steps} --batch 1"));
    let service = serve(&run, &dir.path().join("log"), "127.0.0.1:0");
    let join = |digest| {
        let member = member(service.addr(), 0, digest)?;
        Ok(Arc::new(Silent { member, left: AtomicUsize::new(3) }) as Arc<dyn Membership>)
    };
    let worlds = Worlds::default();
    train(&run, &Elastic { worker: 0, join: &join, connect: &|round| worlds.connect(round) })
}

#[test]
fn without_an_arbiter_a_worker_steps_on_up_to_a_bound() {
    let report = without_arbiter(8).unwrap();
    let life = &report.lives[0];
    assert_eq!((life.losses.len(), life.ended.clone()), (8, None));
    // The boundaries before that were the start and the first two exchanges.
    assert_eq!(life.failed, [2, 3, 4, 5, 6, 7]);
    assert!(life.losses.iter().all(|loss| loss.is_finite()), "{life:?}");
    let error = format!("{:#}", without_arbiter(20).unwrap_err());
    assert!(error.contains("no answer to a boundary"), "{error}");
}

#[test]
fn options_without_a_sense_are_refused() {
    let parse = |options: &str| {
        let words = ["meshstep-bench", "train"].into_iter().chain(options.split_whitespace());
        crate::cli::Cli::try_parse_from(words).map(|_| ()).map_err(|error| error.to_string())
    };
    let arbiter = "--arbiter 127.0.0.1:1";
    assert!(parse(&format!("--local des-loc {arbiter}")).unwrap_err().contains("--worker"));
    assert!(parse("--local des-loc --worker 1").unwrap_err().contains("--arbiter"));
    assert!(parse(&format!("{arbiter} --worker 1")).unwrap_err().contains("--local"));
    assert!(
        parse(&format!("--local des-loc {arbiter} --worker 1 --chaos 1")).unwrap_err().contains("--chaos")
    );
    assert!(parse("--local des-loc --alone 4").unwrap_err().contains("--arbiter"));
    assert!(
        parse("--local des-loc --arbiter 127.0.0.1:1,127.0.0.1:2 --worker 1 --alone 4 --deadline 2").is_ok()
    );
    assert!(parse("--local des-loc --arbiter 127.0.0.1:1,7 --worker 1").unwrap_err().contains("invalid"));
    for (method, hint) in [("every-step", "no rare exchanges"), ("all", "needs one method")] {
        let run = tests::run(&format!("--local {method} --workers 1 --steps 2"));
        assert!(job(&run).map(drop).unwrap_err().to_string().contains(hint), "{method}");
    }
}
