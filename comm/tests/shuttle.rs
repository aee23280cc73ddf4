//! Random programs with random faults under a scheduler that owns every thread and all time: nothing may hang, and every
//! rank must get the right error. A failing seed is printed; `MESHSTEP_FAULT_SEED=<seed>` replays exactly that run.
//!
//! Time passes only when no rank can do anything else. So a deadline comes when somebody is really missing and never
//! because a thread was slow, and what each program leads to is known beforehand.

use meshstep_comm::{Clock, Communicator, Error, Faults, InFlight, Op, Reduction, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use shuttle::scheduler::{RandomScheduler, Schedule, Scheduler, Task, TaskId};
use shuttle::{FailurePersistence, Runner};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);
const DEADLINE: Duration = Duration::from_secs(10);
/// More than any program here needs, so whoever still waits then waits for ever.
const END_OF_TIME: u32 = 500;

#[derive(Clone, Debug)]
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) % n as u64) as usize
    }
}

/// One line of the program that all ranks run.
#[derive(Clone, Copy, Debug)]
enum Step {
    All(Op),
    Pair { from: usize, to: usize },
    Split,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    /// Calls something else instead.
    Wrong(Op, usize, DType),
    Return,
    Panic,
    Abort,
    DropOp,
    TooLate,
    LateButInTime,
}

/// At which step of which rank something goes wrong, and what.
#[derive(Clone, Copy, Debug)]
struct Fault {
    rank: usize,
    step: usize,
    trouble: Trouble,
}

#[derive(Clone, Debug)]
struct Program {
    ranks: usize,
    steps: Vec<Step>,
    faults: Vec<Fault>,
}

impl Step {
    fn needs(self, rank: usize) -> bool {
        match self {
            Step::Pair { from, to } => rank == from || rank == to,
            _ => true,
        }
    }

    fn is_collective(self) -> bool {
        !matches!(self, Step::Pair { .. })
    }

    fn op(self, rank: usize) -> Op {
        match self {
            Step::All(op) => op,
            Step::Pair { from, to } if rank == from => Op::send(to),
            Step::Pair { from, .. } => Op::recv(from),
            Step::Split => Op::barrier(),
        }
    }
}

impl Program {
    fn random(random: &mut Random) -> Self {
        let ranks = 2 + random.below(3);
        let steps: Vec<Step> = (0..1 + random.below(6)).map(|_| step(random, ranks)).collect();
        let count = [0, 1, 1, 1, 1, 1, 1, 2, 2, 2][random.below(10)];
        let mut program = Program { ranks, steps, faults: Vec::new() };
        for _ in 0..count {
            if let Some(fault) = program.fault(random) {
                program.faults.push(fault);
            }
        }
        program
    }

    fn fault(&self, random: &mut Random) -> Option<Fault> {
        let (rank, step) = (random.below(self.ranks), random.below(self.steps.len()));
        let trouble = match random.below(10) {
            0..=3 => wrong(random, self.steps[step], rank, self.ranks)?,
            4 => Trouble::Return,
            5 => Trouble::Panic,
            6 => Trouble::Abort,
            7 => Trouble::DropOp,
            8 => Trouble::TooLate,
            _ => Trouble::LateButInTime,
        };
        let on_the_way = matches!(trouble, Trouble::DropOp | Trouble::TooLate | Trouble::LateButInTime);
        // Two ranks that go wrong at one step might agree with each other.
        let taken = self.faults.iter().any(|fault| fault.rank == rank || fault.step == step);
        let sensible = !taken && (!on_the_way || self.steps[step].needs(rank));
        sensible.then_some(Fault { rank, step, trouble })
    }

    /// The faults that the backend itself injects, by the number of the rank's operation.
    fn injected(&self) -> Faults {
        self.faults.iter().fold(Faults::none(), |faults, &Fault { rank, step, trouble }| {
            let number = self.steps[..step].iter().filter(|step| step.needs(rank)).count() as u64;
            match trouble {
                Trouble::DropOp => faults.drop_op(rank, number),
                Trouble::TooLate => faults.delay(rank, number, DEADLINE * 5 / 2),
                Trouble::LateButInTime => faults.delay(rank, number, DEADLINE / 3),
                _ => faults,
            }
        })
    }

    fn trouble(&self, rank: usize, step: usize) -> Option<Trouble> {
        self.faults.iter().find(|fault| (fault.rank, fault.step) == (rank, step)).map(|fault| fault.trouble)
    }
}

fn step(random: &mut Random, ranks: usize) -> Step {
    let from = random.below(ranks);
    match random.below(9) {
        0 | 1 => Step::All(Op::all_reduce(Reduction::Sum)),
        2 => Step::All(Op::reduce_scatter(Reduction::Mean)),
        3 => Step::All(Op::all_gather()),
        4 => Step::All(Op::all_to_all()),
        5 => Step::All(Op::broadcast(from)),
        6 => Step::Split,
        _ => Step::Pair { from, to: (from + 1 + random.below(ranks - 1)) % ranks },
    }
}

/// Something that contradicts what the other ranks call, where they call a collective.
fn wrong(random: &mut Random, right: Step, rank: usize, ranks: usize) -> Option<Trouble> {
    let (len, other) = (len(ranks), (rank + 1) % ranks);
    let Step::All(op) = right else { return None };
    Some(match random.below(6) {
        0 => Trouble::Wrong(Op::barrier(), len, DType::F32),
        1 => Trouble::Wrong(op, 2 * len, DType::F32),
        2 => Trouble::Wrong(op, len, DType::F64),
        3 => Trouble::Wrong(Op::send(other), len, DType::F32),
        4 => Trouble::Wrong(Op::recv(other), len, DType::F32),
        _ => Trouble::Wrong(Op::all_reduce(Reduction::Max), len, DType::F32),
    })
}

fn len(ranks: usize) -> usize {
    3 * ranks
}

/// What became of a rank's steps; `None` where it did not look.
type Outcomes = Vec<Option<Result<(), Error>>>;

struct Rank<'a> {
    comm: Arc<dyn Communicator>,
    program: &'a Program,
    random: Random,
    outcomes: Outcomes,
    flying: Vec<(usize, InFlight)>,
}

impl Rank<'_> {
    /// Runs the program to its end, also after failures. `false` where the rank is to panic.
    fn run(&mut self) -> bool {
        let me = self.comm.rank();
        for (i, &step) in self.program.steps.iter().enumerate() {
            let (mut op, mut len, mut dtype) = (step.op(me), len(self.program.ranks), DType::F32);
            match self.program.trouble(me, i) {
                Some(Trouble::Return) => break,
                Some(Trouble::Panic) => {
                    self.land();
                    return false;
                }
                Some(Trouble::Abort) => {
                    self.land();
                    self.comm.abort();
                }
                Some(Trouble::Wrong(other, other_len, other_dtype)) => {
                    (op, len, dtype) = (other, other_len, other_dtype);
                }
                _ => {}
            }
            if step.needs(me) {
                self.call(i, step, op, values(me, len, dtype));
            }
        }
        self.land();
        true
    }

    fn call(&mut self, i: usize, step: Step, op: Op, mut buffer: Buffer) {
        if matches!(step, Step::Split) {
            let result = self.comm.split(Some(0), 0).map(drop);
            return self.outcomes[i] = Some(result);
        }
        if self.random.below(2) == 0 {
            let result = self.comm.run(op, &mut buffer);
            self.check_sum(step, &buffer, &result);
            return self.outcomes[i] = Some(result);
        }
        match self.comm.start(op, buffer, &Queue::cpu()) {
            Ok(started) => self.flying.push((i, started)),
            Err((_, error)) => self.outcomes[i] = Some(Err(error)),
        }
    }

    /// Waits for what is in flight, or lets it go unseen.
    fn land(&mut self) {
        for (i, started) in std::mem::take(&mut self.flying) {
            if self.random.below(8) > 0 {
                let (buffer, result) = started.wait(&Queue::cpu());
                self.check_sum(self.program.steps[i], &buffer, &result);
                self.outcomes[i] = Some(result);
            }
        }
    }

    fn check_sum(&self, step: Step, buffer: &Buffer, result: &Result<(), Error>) {
        let summed = matches!(step, Step::All(op) if op == Op::all_reduce(Reduction::Sum));
        if summed && result.is_ok() {
            let n = self.program.ranks as f32;
            assert!(buffer.typed::<f32>().unwrap().iter().all(|&x| x == n * (n + 1.0) / 2.0));
        }
    }
}

fn values(rank: usize, len: usize, dtype: DType) -> Buffer {
    match dtype {
        DType::F32 => {
            Buffer::from_slice(&vec![rank as f32 + 1.0; len], &Meter::new(), Category::Grads).unwrap()
        }
        other => Buffer::zeroed(len, other, &Meter::new(), Category::Grads).unwrap(),
    }
}

/// One run: the ranks on threads of their own, and time on this one.
fn simulate(seed: u64) {
    let mut random = Random(seed);
    let program = Arc::new(Program::random(&mut random));
    let (clock, outcomes) = (Clock::manual(), Arc::new(Mutex::new(vec![Vec::new(); program.ranks])));
    let ended = Arc::new(AtomicBool::new(false));
    let world = {
        let (program, clock, outcomes, ended) =
            (program.clone(), clock.clone(), outcomes.clone(), ended.clone());
        move || {
            let faults = program.injected();
            let config =
                loopback::Config { timeout: DEADLINE, clock, faults, ..loopback::Config::new(program.ranks) };
            let result = loopback::spawn_with(config, |comm| {
                let (me, mut random) = (comm.rank(), random.clone());
                random.0 ^= me as u64;
                let nothing = vec![None; program.steps.len()];
                let mut rank =
                    Rank { comm, program: &program, random, outcomes: nothing, flying: Vec::new() };
                let lives = rank.run();
                outcomes.lock().unwrap()[me] = std::mem::take(&mut rank.outcomes);
                if !lives {
                    resume_unwind(Box::new("as planned"));
                }
            });
            ended.store(true, SeqCst);
            result
        }
    };
    let world = shuttle::thread::spawn(world);
    for _ in 0..END_OF_TIME {
        if ended.load(SeqCst) {
            break;
        }
        clock.advance(SECOND);
        shuttle::thread::yield_now();
    }
    assert!(ended.load(SeqCst), "somebody waits for ever: {program:?}");
    let result = world.join().unwrap();
    // What was let go unseen may still have to see its deadline; shuttle fails the run if any thread is left over then.
    (0..60).for_each(|_| clock.advance(SECOND));
    let outcomes = outcomes.lock().unwrap();
    let panics = program.faults.iter().any(|fault| fault.trouble == Trouble::Panic);
    assert_eq!(result.is_err(), panics, "{result:?}");
    judge(&program, &outcomes);
}

/// Whether everybody got what the program leads to.
fn judge(program: &Program, outcomes: &[Outcomes]) {
    let causes: Vec<&Error> = outcomes
        .iter()
        .flatten()
        .flatten()
        .filter_map(|result| result.as_ref().err())
        .map(Error::cause)
        .collect();
    assert!(
        causes.windows(2).all(|two| two[0] == two[1]),
        "one failure, one cause: {causes:?} of {program:?}"
    );
    if let Some(cause) = causes.first() {
        let fits = |fault: &Fault| explains(fault, cause);
        assert!(program.faults.iter().any(fits), "{cause} does not follow from {program:?}");
    }
    for (rank, its) in outcomes.iter().enumerate() {
        told_once(its);
        for (i, outcome) in its.iter().enumerate() {
            let Some(outcome) = outcome else { continue };
            let context = || format!("rank {rank}, step {i}: {outcome:?} in {program:?}");
            assert!(!must_fail(program, rank, i) || outcome.is_err(), "{}", context());
            assert!(!must_succeed(program, outcomes, i) || outcome.is_ok(), "{}", context());
        }
    }
}

/// The first failure a rank sees is the cause itself, every later one its repetition. An operation that was let go
/// unseen may have been the first.
fn told_once(outcomes: &Outcomes) {
    let errors: Vec<&Error> = outcomes.iter().flatten().filter_map(|result| result.as_ref().err()).collect();
    let later = errors.iter().skip(1).all(|error| matches!(error, Error::Poisoned { .. }));
    let all_seen = outcomes.iter().all(Option::is_some);
    let first = errors.first().is_none_or(|error| !all_seen || !matches!(error, Error::Poisoned { .. }));
    assert!(first && later, "{outcomes:?}");
}

fn explains(fault: &Fault, cause: &Error) -> bool {
    match (fault.trouble, cause) {
        (Trouble::Wrong(..), Error::Mismatch { calls, .. }) => calls.iter().flatten().count() >= 2,
        (Trouble::Return, Error::Left { rank, .. }) => *rank == fault.rank,
        (Trouble::Panic, Error::Panicked { rank, message }) => *rank == fault.rank && message == "as planned",
        (Trouble::Abort, Error::Aborted { rank }) => *rank == fault.rank,
        (Trouble::DropOp | Trouble::TooLate, Error::Timeout { missing, after, .. }) => {
            missing.contains(&fault.rank) && *after == DEADLINE
        }
        _ => false,
    }
}

/// A step cannot succeed that needs a rank which, by then, has gone wrong, nor one after a collective that could not.
fn must_fail(program: &Program, rank: usize, step: usize) -> bool {
    let fatal = |fault: &Fault| fault.trouble != Trouble::LateButInTime;
    program.faults.iter().filter(|fault| fatal(fault)).any(|fault| {
        let broken = |i: usize| {
            let by_then = fault.step <= i;
            by_then && (program.steps[i].is_collective() || program.steps[i].needs(fault.rank))
        };
        let itself = broken(step) && program.steps[step].needs(rank);
        let before = (fault.step..step).any(|i| broken(i) && program.steps[i].is_collective());
        itself || before
    })
}

/// A step cannot fail that is over before anything goes wrong: because a later collective, or itself, is one that the
/// ranks in trouble have seen the end of.
fn must_succeed(program: &Program, outcomes: &[Outcomes], step: usize) -> bool {
    let fatal = || program.faults.iter().filter(|fault| fault.trouble != Trouble::LateButInTime);
    let Some(first) = fatal().map(|fault| fault.step).min() else { return true };
    let over = |i: usize| fatal().all(|fault| outcomes[fault.rank][i].is_some());
    (step..first).any(|i| program.steps[i].is_collective() && over(i))
}

/// Picks at random, but lets time pass only when nothing else can happen.
struct TimeStandsStill {
    random: RandomScheduler,
    next_seed: u64,
    last_seed: u64,
    current: Arc<AtomicU64>,
}

impl Scheduler for TimeStandsStill {
    fn new_execution(&mut self) -> Option<Schedule> {
        // Says that its only execution is over; otherwise it takes being replaced for a failure.
        let _none = self.random.new_execution();
        if self.next_seed > self.last_seed {
            return None;
        }
        self.current.store(self.next_seed, SeqCst);
        self.random = RandomScheduler::new_from_seed(self.next_seed, 1);
        self.next_seed += 1;
        self.random.new_execution()
    }

    fn next_task(&mut self, runnable: &[&Task], current: Option<TaskId>, yields: bool) -> Option<TaskId> {
        let time = TaskId::from(0);
        let others: Vec<&Task> = runnable.iter().copied().filter(|task| task.id() != time).collect();
        let choice = if others.is_empty() { runnable } else { &others };
        self.random.next_task(choice, current, yields)
    }

    fn next_u64(&mut self) -> u64 {
        self.random.next_u64()
    }
}

/// What another run of a failing seed may be compared by.
fn run_seeds(first: u64, last: u64) {
    let current = Arc::new(AtomicU64::new(first));
    let random = RandomScheduler::new_from_seed(0, 0);
    let scheduler = TimeStandsStill { random, next_seed: first, last_seed: last, current: current.clone() };
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 18;
    config.failure_persistence = FailurePersistence::None;
    let seed = current.clone();
    let run = move || simulate(seed.load(SeqCst));
    let result = catch_unwind(AssertUnwindSafe(|| Runner::new(scheduler, config).run(run)));
    if let Err(panic) = result {
        let seed = current.load(SeqCst);
        eprintln!("seed {seed} fails; replay it with MESHSTEP_FAULT_SEED={seed}");
        resume_unwind(panic);
    }
}

#[test]
fn thousands_of_random_fault_schedules_end_as_they_must() {
    if let Ok(seed) = std::env::var("MESHSTEP_FAULT_SEED") {
        let seed = seed.parse().expect("MESHSTEP_FAULT_SEED is a number");
        return run_seeds(seed, seed);
    }
    let count = if std::env::var_os("MESHSTEP_LONG").is_some() { 200_000 } else { 5000 };
    run_seeds(0, count - 1);
}
