//! A run in simulated time: workers, an arbiter with its disk, and a network that delays, drops, repeats and reorders messages, all
//! from one seed. Invariants are asserted at the point of a violation.

mod workers;

use crate::common::{DIGEST, config};
use crate::training::{Model, mix};
use meshstep_membership::{
    Arbiter, Decision, Error, FromArbiter, Member, Output, Request, Round, State, ToArbiter, Worker,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::time::Duration;

/// A worker's deadline for a call.
pub(crate) const DEADLINE: Duration = Duration::from_secs(40);
/// Longest time that a collective waits for the other ranks.
const COMM_DEADLINE: Duration = Duration::from_secs(2);

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) struct Random(u64);

impl Random {
    /// Returns a number below `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0, 11) % n
    }

    /// Returns true with a probability of `per_mille` / 1000.
    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

/// Probabilities of failures, per mille.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trouble {
    pub(crate) loss: u64,
    pub(crate) repeat: u64,
    /// Death of a worker as it receives a commit.
    pub(crate) death_before_apply: u64,
    /// Death of a worker after it has voted.
    pub(crate) death_after_vote: u64,
    /// Death of an arbiter before its log is written, or after that while messages are being sent.
    pub(crate) arbiter_death: u64,
    pub(crate) veto: u64,
    pub(crate) failure: u64,
    /// True if an aborted exchange is repeated; otherwise it is left out.
    pub(crate) retry: bool,
}

#[derive(Debug)]
enum Event {
    ToArbiter(ToArbiter),
    FromArbiter(FromArbiter),
    Wake(usize),
    ArbiterWake,
    ArbiterStart,
    ArbiterCrash,
    Spawn { id: u64 },
    Crash(usize),
    Stall(usize, Duration),
    Leave(usize),
}

#[derive(Debug)]
enum Phase {
    Computing {
        until: Duration,
    },
    Asking {
        since: Duration,
    },
    /// The worker's contribution is visible to the others from `posted` on.
    Exchanging {
        round: Round,
        posted: Duration,
        done: Duration,
        gives_up: Duration,
    },
    Voting {
        round: Round,
        result: Option<[Option<u64>; 3]>,
        since: Duration,
    },
    Leaving,
    /// The worker has left, met an error, or died.
    Over,
}

#[derive(Debug)]
pub(crate) struct Simulated {
    member: Member,
    pub(crate) model: Model,
    phase: Phase,
    stalled_until: Duration,
    stalled: Duration,
    asked: u64,
    /// Time of the next wake; wakes at other times are stale.
    wake_at: Duration,
    inbox: Vec<FromArbiter>,
    wants_to_leave: bool,
    too_few: usize,
    pub(crate) rounds: Vec<Round>,
    pub(crate) applied: Vec<u64>,
    pub(crate) end: Option<End>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    Died,
    Left,
    Error(Error),
}

/// The history according to the log.
#[derive(Debug, Default)]
pub(crate) struct Truth {
    granted: HashMap<u64, (u64, u64, Vec<Worker>)>,
    pub(crate) decided: BTreeMap<u64, Decision>,
    epochs: HashMap<u64, Vec<Worker>>,
    /// Step of every commit, by round.
    pub(crate) commits: BTreeMap<u64, u64>,
    results: HashMap<u64, (u64, [u64; 3])>,
}

pub(crate) struct World {
    pub(crate) random: Random,
    pub(crate) trouble: Trouble,
    pub(crate) now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    events: HashMap<u64, Event>,
    next_event: u64,
    pub(crate) arbiter: Option<Arbiter>,
    min_workers: usize,
    founders: usize,
    pub(crate) disk: Option<State>,
    pub(crate) workers: Vec<Simulated>,
    /// Contributions to each exchange, by round and id.
    boards: HashMap<u64, BTreeMap<u64, Model>>,
    pub(crate) truth: Truth,
    target: u64,
}

impl World {
    pub(crate) fn new(seed: u64, founders: usize, min_workers: usize, target: u64, trouble: Trouble) -> Self {
        let mut world = World {
            random: Random(seed),
            trouble,
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            events: HashMap::new(),
            next_event: 0,
            arbiter: None,
            min_workers,
            founders,
            disk: None,
            workers: Vec::new(),
            boards: HashMap::new(),
            truth: Truth::default(),
            target,
        };
        world.at(Duration::ZERO, Event::ArbiterStart);
        (0..founders as u64).for_each(|id| world.spawn_at(millis(1), id));
        world
    }

    fn at(&mut self, time: Duration, event: Event) {
        self.next_event += 1;
        self.events.insert(self.next_event, event);
        self.queue.push(Reverse((time.max(self.now), self.next_event)));
    }

    pub(crate) fn spawn_at(&mut self, time: Duration, id: u64) {
        self.at(time, Event::Spawn { id });
    }

    pub(crate) fn crash_at(&mut self, time: Duration, worker: usize) {
        self.at(time, Event::Crash(worker));
    }

    pub(crate) fn stall_at(&mut self, time: Duration, worker: usize, span: Duration) {
        self.at(time, Event::Stall(worker, span));
    }

    pub(crate) fn leave_at(&mut self, time: Duration, worker: usize) {
        self.at(time, Event::Leave(worker));
    }

    pub(crate) fn arbiter_crash_at(&mut self, time: Duration) {
        self.at(time, Event::ArbiterCrash);
    }

    /// Runs until no event is left or the time is `until`.
    pub(crate) fn run(&mut self, until: Duration) {
        while let Some(Reverse((time, number))) = self.queue.pop() {
            if time > until {
                self.queue.push(Reverse((time, number)));
                self.now = until;
                return;
            }
            self.now = time;
            let event = self.events.remove(&number).unwrap();
            self.happen(event);
            if self.workers.len() >= self.founders && self.all_over() {
                return;
            }
        }
    }

    pub(crate) fn all_over(&self) -> bool {
        let spawning = self.events.values().any(|event| matches!(event, Event::Spawn { .. }));
        !spawning && self.workers.iter().all(|worker| worker.end.is_some())
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::ToArbiter(message) => {
                if let Some(arbiter) = &mut self.arbiter {
                    let output = arbiter.hear(message, self.now);
                    self.arbiter_says(output);
                }
            }
            Event::ArbiterWake => {
                let due = |arbiter: &&mut Arbiter| arbiter.wake_at().is_some_and(|at| at <= self.now);
                if let Some(arbiter) = self.arbiter.as_mut().filter(due) {
                    let output = arbiter.tick(self.now);
                    self.arbiter_says(output);
                }
            }
            Event::ArbiterStart => {
                let config = config(self.founders, self.min_workers);
                let (arbiter, output) = Arbiter::new(config, self.disk.clone(), self.now).unwrap();
                self.arbiter = Some(arbiter);
                self.arbiter_says(output);
            }
            Event::ArbiterCrash => self.arbiter_dies(),
            Event::FromArbiter(message) => {
                let to = self.workers.iter().position(|worker| worker.member.worker() == message.to);
                let to = to.unwrap();
                self.workers[to].inbox.push(message);
                self.drive(to);
            }
            Event::Wake(worker) if self.workers[worker].wake_at == self.now => self.drive(worker),
            Event::Wake(_) => {}
            Event::Spawn { id } => self.spawn(id),
            Event::Crash(worker) => self.die(worker),
            Event::Stall(worker, span) => {
                if let Some(stalled) = self.workers.get_mut(worker) {
                    let until = self.now + span;
                    (stalled.stalled_until, stalled.wake_at) = (until, until);
                    stalled.stalled += span;
                    self.at(until, Event::Wake(worker));
                }
            }
            Event::Leave(worker) => {
                self.workers.get_mut(worker).into_iter().for_each(|worker| worker.wants_to_leave = true);
            }
        }
    }

    fn spawn(&mut self, id: u64) {
        let worker = Worker { id, life: self.workers.len() as u64 + 1 };
        let mut member = Member::new(worker, DIGEST, format!("worker {id}"), DEADLINE);
        let asked = member.begin(Request::Join, self.now);
        self.workers.push(Simulated {
            member,
            model: Model::new(),
            phase: Phase::Asking { since: self.now },
            stalled_until: Duration::ZERO,
            stalled: Duration::ZERO,
            asked,
            wake_at: Duration::ZERO,
            inbox: Vec::new(),
            wants_to_leave: false,
            too_few: 0,
            rounds: Vec::new(),
            applied: Vec::new(),
            end: None,
        });
        self.drive(self.workers.len() - 1);
    }

    fn die(&mut self, worker: usize) {
        if let Some(worker) = self.workers.get_mut(worker).filter(|worker| worker.end.is_none()) {
            worker.end = Some(End::Died);
            worker.phase = Phase::Over;
        }
    }

    fn arbiter_dies(&mut self) {
        self.arbiter = None;
        let down = millis(self.random.below(3000));
        self.at(self.now + down, Event::ArbiterStart);
    }

    /// Logs, then sends; the arbiter may die before, between and during these.
    fn arbiter_says(&mut self, output: Output) {
        assert!(self.arbiter.as_ref().unwrap().superseded().is_none());
        let may_die = output.log.is_some();
        if may_die && self.random.chance(self.trouble.arbiter_death) {
            return self.arbiter_dies();
        }
        if let Some(state) = output.log {
            assert_eq!(State::decode(&state.encode()).as_ref(), Some(&state));
            self.truth.log(&state);
            self.disk = Some(state);
        }
        let dies = may_die && self.random.chance(self.trouble.arbiter_death);
        let said =
            if dies { self.random.below(output.send.len() as u64 + 1) as usize } else { output.send.len() };
        for message in output.send.into_iter().take(said) {
            let message = FromArbiter::decode(&message.encode()).unwrap();
            self.travel(|| Event::FromArbiter(message.clone()));
        }
        if dies {
            return self.arbiter_dies();
        }
        if let Some(at) = self.arbiter.as_ref().and_then(Arbiter::wake_at) {
            self.at(at.max(self.now + millis(1)), Event::ArbiterWake);
        }
    }

    fn travel(&mut self, event: impl Fn() -> Event) {
        if !self.random.chance(self.trouble.loss) {
            let copies = 1 + u64::from(self.random.chance(self.trouble.repeat));
            for _ in 0..copies {
                let late = if self.random.chance(20) { 2000 } else { 20 };
                let delay = millis(1 + self.random.below(late));
                self.at(self.now + delay, event());
            }
        }
    }
}

impl Truth {
    /// Checks the next state of the log against the history.
    fn log(&mut self, state: &State) {
        let members: Vec<Worker> = state.members.iter().map(|place| place.worker).collect();
        if state.round == 0 {
            return;
        }
        let epoch = self.epochs.entry(state.epoch).or_insert_with(|| members.clone());
        assert_eq!(*epoch, members, "the members of epoch {}", state.epoch);
        let granted = (state.epoch, state.step, members);
        assert_eq!(*self.granted.entry(state.round).or_insert_with(|| granted.clone()), granted);
        let Some(decision) = &state.decision else {
            assert!(!self.decided.contains_key(&state.round), "round {} was decided", state.round);
            return;
        };
        assert_eq!(self.decided.entry(state.round).or_insert_with(|| decision.clone()), decision);
        if decision.is_commit() {
            let before = self.commits.insert(state.round, state.step);
            let other =
                self.commits.iter().find(|(round, step)| **round != state.round && **step == state.step);
            assert!(
                before.is_none_or(|step| step == state.step) && other.is_none(),
                "two commits of step {}",
                state.step
            );
        }
    }
}
