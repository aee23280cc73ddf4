//! The simulated world: time, the arbiter with its disk, a network that delays, drops, repeats and reorders messages, and workers
//! with ranks that are threads, of which one runs at a time. All events are a function of the seed alone.

mod events;

use crate::chaos::baton::Gate;
use crate::chaos::group::Group;
use crate::chaos::place::Place;
use crate::chaos::schedule::{Random, Setup, Turn};
use crate::chaos::truth::Truth;
use meshstep_membership::{
    Answer, Arbiter, Config, Decision, Error, FromArbiter, Member, Round, ToArbiter, Worker,
};
use std::any::Any;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest time that a collective waits for the other ranks.
pub(crate) const COMM_DEADLINE: Duration = Duration::from_secs(2);
/// Longest time that a rank waits for the others of its worker: longer than any stall.
pub(crate) const INSIDE_DEADLINE: Duration = Duration::from_secs(30);
/// By this time every worker has ended, whatever happened.
const HORIZON: Duration = Duration::from_secs(3000);

pub(crate) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[derive(Debug)]
pub(crate) enum Event {
    ToArbiter(ToArbiter),
    FromArbiter(FromArbiter),
    Wake(usize),
    /// A rank may be able to continue.
    Look(usize),
    ArbiterWake,
    ArbiterStart,
    ArbiterCrash,
    Spawn(u64),
    Crash(usize),
    Stall(usize, Duration),
    Leave(usize),
    /// An operation of a group is over, but failed on some ranks.
    Moved(usize, usize, Vec<usize>),
    /// A rank's deadline for an operation.
    Late(usize, usize, usize),
    /// The other ranks notice that a rank is gone.
    Gone(usize, usize),
}

/// Condition for which a thread waits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Need {
    Until(Duration),
    Answer(u64),
    Operation { group: usize, rank: usize, number: usize },
}

/// Panic payload of a killed worker's thread.
pub(crate) struct Killed;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    Died,
    Left,
    Error(String),
}

/// Round of a vote, and its answer.
pub(crate) type Voted = (u64, Result<Decision, Error>);

/// A rank of a worker from its start to its end. Each rank stalls and dies alone.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) id: u64,
    /// Rank 0 of the worker, which has the membership.
    pub(crate) lead: usize,
    pub(crate) member: Option<Member>,
    /// Group of the worker's ranks.
    pub(crate) inside: usize,
    /// Grants of rank 0, answers to its votes, and the turns of the worker, which are the same for all ranks.
    pub(crate) granted: Vec<Round>,
    pub(crate) voted: Vec<Voted>,
    pub(crate) turns: Vec<Turn>,
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
    pub(crate) need: Option<Need>,
    pub(crate) answer: Option<Result<Answer, Error>>,
    inbox: Vec<FromArbiter>,
    stalled_until: Duration,
    pub(crate) stalled: Duration,
    /// Time of the next wake; wakes at other times are stale.
    wake_at: Duration,
    pub(crate) dead: bool,
    pub(crate) wants_to_leave: bool,
    pub(crate) end: Option<End>,
    /// Rounds of the worker (step, true if it counted, divisor), and the rounds that it has applied.
    pub(crate) rounds: Vec<(u64, bool, usize)>,
    pub(crate) applied: Vec<u64>,
    /// Hashes of the state after each step.
    pub(crate) hashes: Vec<(u64, [u64; 3])>,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) setup: Setup,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) random: Random,
    setup: Setup,
    pub(crate) now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    events: HashMap<u64, Event>,
    next_event: u64,
    arbiter: Option<Arbiter>,
    disk: Option<Vec<u8>>,
    pub(crate) lives: Vec<Life>,
    pub(crate) groups: Vec<Group>,
    /// Group of each epoch: of all ranks (`None`), or of the ranks with this index in their workers.
    pub(crate) epochs: BTreeMap<(u64, Option<usize>), usize>,
    /// Groups split from a group by an operation, by colour.
    pub(crate) splits: BTreeMap<(usize, usize, u32), usize>,
    pub(crate) truth: Truth,
    /// All events, in order.
    pub(crate) log: Vec<(Duration, String)>,
    failure: Option<Box<dyn Any + Send>>,
}

impl World {
    pub(crate) fn new(seed: u64, setup: Setup) -> Arc<Self> {
        let mut inner = Inner {
            random: Random(seed),
            setup: setup.clone(),
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            events: HashMap::new(),
            next_event: 0,
            arbiter: None,
            disk: None,
            lives: Vec::new(),
            groups: Vec::new(),
            epochs: BTreeMap::new(),
            splits: BTreeMap::new(),
            truth: Truth::default(),
            log: Vec::new(),
            failure: None,
        };
        inner.at(Duration::ZERO, Event::ArbiterStart);
        (0..setup.founders as u64).for_each(|id| inner.at(millis(1), Event::Spawn(id)));
        Arc::new(World { setup, inner: Mutex::new(inner) })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn happens_at(&self, time: Duration, event: Event) {
        self.lock().at(time, event);
    }

    /// Runs until every worker has ended. A worker that waits for ever is an error, and so is a failed assertion of a worker.
    pub(crate) fn run(self: &Arc<Self>) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            while !self.lock().all_over() {
                self.happen_next();
            }
        }));
        let lives = self.lock().lives.len();
        (0..lives).for_each(|life| self.kill(life));
        let failure = self.lock().failure.take();
        if let Some(failure) = failure.or(result.err()) {
            resume_unwind(failure);
        }
    }

    fn happen_next(self: &Arc<Self>) {
        let event = self.lock().next();
        assert!(self.lock().now < HORIZON, "somebody waits for ever: {:#?}", self.lock().lives);
        let concerned = match event {
            Event::Spawn(id) => self.spawn(id),
            Event::Crash(life) => {
                if life < self.lock().lives.len() {
                    self.kill(life);
                }
                Vec::new()
            }
            event => self.lock().happen(event),
        };
        concerned.into_iter().for_each(|life| self.drive(life));
        if let Some(failure) = self.lock().failure.take() {
            resume_unwind(failure);
        }
    }

    /// Lets a rank continue as far as possible.
    fn drive(&self, life: usize) {
        loop {
            // The world is not locked while the rank holds the baton.
            let gate = self.lock().ready(life);
            let Some(gate) = gate else { break };
            gate.resume();
        }
        self.lock().settle(life);
    }

    fn kill(&self, life: usize) {
        let (gate, thread) = {
            let mut inner = self.lock();
            let one = &mut inner.lives[life];
            one.dead |= one.end.is_none();
            (Arc::clone(&one.gate), one.thread.take())
        };
        let over = self.lock().lives[life].end.is_some();
        if !over {
            gate.resume();
        }
        thread.into_iter().for_each(|thread| thread.join().unwrap());
    }

    /// Starts a worker with all its ranks.
    fn spawn(self: &Arc<Self>, id: u64) -> Vec<usize> {
        let mut inner = self.lock();
        let (lead, ranks, inside) = (inner.lives.len(), self.setup.ranks, inner.groups.len());
        let lives = (lead..lead + ranks).map(Some).collect();
        inner.groups.push(Group::inside(lives, INSIDE_DEADLINE));
        drop(inner);
        (0..ranks).map(|rank| self.spawn_rank(id, lead, rank, inside)).collect()
    }

    fn spawn_rank(self: &Arc<Self>, id: u64, lead: usize, rank: usize, inside: usize) -> usize {
        let gate = Arc::new(Gate::new());
        let mut inner = self.lock();
        let life = inner.lives.len();
        let worker = Worker { id, life: life as u64 + 1 };
        let (digest, deadline) = (inner.setup.digest, inner.setup.deadline);
        let member = (rank == 0).then(|| Member::new(worker, digest, format!("worker {id}"), deadline));
        let (place, its) = (Place { world: Arc::clone(self), life, lead, rank }, Arc::clone(&gate));
        let body = move || {
            its.begin();
            let lived = catch_unwind(AssertUnwindSafe(|| crate::chaos::worker::live(&place)));
            place.world.lock().ended(life, lived);
            its.end();
        };
        let thread = std::thread::Builder::new().name(format!("worker {id}")).spawn(body).unwrap();
        let now = inner.now;
        inner.lives.push(Life {
            id,
            lead,
            member,
            inside,
            granted: Vec::new(),
            voted: Vec::new(),
            turns: Vec::new(),
            gate,
            thread: Some(thread),
            need: Some(Need::Until(now)),
            answer: None,
            inbox: Vec::new(),
            stalled_until: Duration::ZERO,
            stalled: Duration::ZERO,
            wake_at: Duration::ZERO,
            dead: false,
            wants_to_leave: false,
            end: None,
            rounds: Vec::new(),
            applied: Vec::new(),
            hashes: Vec::new(),
        });
        life
    }

    /// Waits until `need` is met; called by a rank.
    pub(crate) fn wait(&self, life: usize, need: Need) {
        if std::thread::panicking() {
            return;
        }
        let gate = {
            let mut inner = self.lock();
            inner.lives[life].need = Some(need);
            Arc::clone(&inner.lives[life].gate)
        };
        gate.pause();
        if self.lock().lives[life].dead {
            resume_unwind(Box::new(Killed));
        }
    }
}

impl Setup {
    fn config(&self) -> Config {
        let (silence, patience) = (Duration::from_secs(1), Duration::from_secs(3));
        Config { min_workers: self.min_workers, silence, patience, ..Config::new(self.digest, self.founders) }
    }
}
