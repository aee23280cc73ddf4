//! Schedules with threads as ranks.

use super::ill::Ill;
use super::program::{self, Ended, Order};
use super::schedule::{RankKind, Schedule, Way};
use super::strangers;
use super::verdict::{Expected, RankRun, Report, judge};
use super::wires::Wires;
use crate::rendezvous::Environment;
use crate::tcp::card::Card;
use crate::tcp::meeting::meet_by;
use crate::tcp::tests::common::{environment, options};
use crate::tcp::{Encrypt, Options, World, join};
use crate::{Communicator, loopback};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Time for all ranks to begin the next generation.
const NEXT: Duration = Duration::from_secs(15);
/// Deadline of operations that must succeed.
const CALM: Duration = Duration::from_secs(20);

/// Returns the options of a schedule's ranks.
pub(super) fn options_of(schedule: &Schedule) -> Options {
    let (encrypt, shared_memory) = match schedule.way {
        Way::Sockets => (Encrypt::Never, false),
        Way::Sealed => (Encrypt::Always, false),
        Way::Memory | Way::Mixed => (Encrypt::Remote, true),
    };
    Options { shared_memory, timeout: schedule.deadline, ..options(encrypt) }
}

/// Results of a program without faults, by rank.
pub(super) fn expected(n: usize, steps: &[program::Step], seed: u64) -> Expected {
    let run = |world: Arc<dyn Communicator>| {
        let ended = program::run(&world, steps, seed, |_| Order::Go);
        ended.into_iter().map(|ended| ended.result.unwrap()).collect()
    };
    loopback::spawn(n, run).unwrap()
}

/// What the ranks of a schedule share.
struct Field<'a> {
    schedule: &'a Schedule,
    wires: Wires,
    addr: SocketAddr,
    /// Addresses of the ranks' listeners.
    listeners: Mutex<Vec<SocketAddr>>,
    check: &'a Expected,
}

/// Runs a schedule and judges it.
pub(super) fn run(schedule: &Schedule) -> Result<Report, String> {
    let Schedule { n, seed, .. } = *schedule;
    let expected_here = expected(n, &schedule.steps, seed);
    let check = expected(n, &program::check(), seed);
    let (wires, addr) = (Wires::start(n, schedule.wires()), meshstep_cases::process::free_addr());
    let field = Field { schedule, wires, addr, listeners: Mutex::default(), check: &check };
    let (runs, complaints) = thread::scope(|scope| {
        let ranks: Vec<_> = (0..n).map(|rank| scope.spawn(move_rank(&field, rank))).collect();
        let strangers = scope.spawn(|| field.strangers());
        let runs: Vec<RankRun> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        (runs, strangers.join().unwrap())
    });
    match complaints.first() {
        Some(complaint) => Err(complaint.clone()),
        None => judge(schedule, &expected_here, &runs),
    }
}

fn move_rank<'a>(field: &'a Field<'a>, rank: usize) -> impl FnOnce() -> RankRun + 'a {
    move || field.rank(rank)
}

/// Drops the world while its thread unwinds.
fn unwind(world: World) {
    let unwinds: Result<(), _> = catch_unwind(AssertUnwindSafe(move || {
        let _lost = world;
        resume_unwind(Box::new("on purpose"))
    }));
    assert!(unwinds.is_err());
}

impl Field<'_> {
    fn environment(&self, rank: usize, restart: u64) -> Environment {
        Environment { restart, ..environment(self.addr, rank, self.schedule.n) }
    }

    /// Joins through the relays, with the fault of this rank's frames.
    fn world(&self, rank: usize) -> World {
        let route = |cards: Vec<Card>| self.route(rank, cards);
        let mut streams = meet_by(&self.environment(rank, 0), &options_of(self.schedule), route).unwrap();
        if let Some(fault) = self.schedule.frames_of(rank) {
            streams.transport = Box::new(Ill::new(streams.transport, fault));
        }
        World::over(streams).unwrap()
    }

    fn route(&self, rank: usize, mut cards: Vec<Card>) -> Vec<Card> {
        *self.listeners.lock().unwrap() = cards.iter().map(|card| card.addr).collect();
        for (to, card) in cards.iter_mut().enumerate() {
            if rank < to {
                card.addr = self.wires.addr((rank, to), card.addr);
            }
            if self.schedule.way == Way::Mixed {
                card.host.boot = format!("machine {}", to % 2);
            }
        }
        cards
    }

    /// Runs one rank: the program, the next generation, and a new world if a rank has left.
    fn rank(&self, rank: usize) -> RankRun {
        let world = self.world(rank);
        let (seed, steps) = (self.schedule.seed, &self.schedule.steps);
        let comm = world.communicator();
        let mut end = None;
        let ended = program::run(&comm, steps, seed, |step| self.order(rank, step, &comm, &mut end));
        drop(comm);
        let mut run = RankRun { ended, gone: end.is_some(), ..RankRun::default() };
        match end {
            Some(RankKind::Panic) => unwind(world),
            Some(_) => drop(world),
            None => self.go_on(world, &mut run),
        }
        if self.schedule.faults_of_departure().next().is_some() {
            let world = join(&self.environment(rank, 1), &self.calm()).map_err(|error| error.to_string());
            run.rejoined = Some(world.and_then(|world| self.checked(&world)));
        }
        run
    }

    fn calm(&self) -> Options {
        Options { timeout: CALM, ..options_of(self.schedule) }
    }

    /// Does what the schedule has for the rank before a step; returns its order.
    fn order(
        &self,
        rank: usize,
        step: usize,
        comm: &Arc<dyn Communicator>,
        end: &mut Option<RankKind>,
    ) -> Order {
        let Some(fault) = self.schedule.of_rank(rank).find(|fault| fault.step == step) else {
            return Order::Go;
        };
        match fault.kind {
            RankKind::Sleep => thread::sleep(self.schedule.deadline + Duration::from_millis(300)),
            RankKind::Abort => comm.abort(),
            RankKind::CallAnother => return Order::CallAnother,
            kind => {
                *end = Some(kind);
                return Order::End;
            }
        }
        Order::Go
    }

    /// Goes on to the next generation, and checks that it works.
    fn go_on(&self, world: World, run: &mut RankRun) {
        self.wires.heal();
        let begin = Instant::now();
        let next = world.next_generation(NEXT);
        run.next_took = begin.elapsed();
        let next = next.map_err(|error| error.to_string());
        run.next = Some(next.and_then(|next| self.checked(&next)));
    }

    /// Runs the check program in a world.
    fn checked(&self, world: &World) -> Result<(), String> {
        let ended = program::run(&world.communicator(), &program::check(), self.schedule.seed, |_| Order::Go);
        for (step, Ended { result, .. }) in ended.iter().enumerate() {
            match result {
                Ok(hash) if *hash == self.check[world.rank()][step] => {}
                other => return Err(format!("step {step} of the check: {other:?}")),
            }
        }
        // A rank that ends early must not disturb the others.
        world.generation().barrier("checked", CALM).map_err(|error| error.to_string())
    }

    fn strangers(&self) -> Vec<String> {
        let each = self.schedule.strangers();
        if each == 0 {
            return Vec::new();
        }
        while self.listeners.lock().unwrap().is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        let mut addrs = self.listeners.lock().unwrap().clone();
        addrs.push(self.addr);
        strangers::visit(&addrs, each)
    }
}
