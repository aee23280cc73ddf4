//! Random programs with random faults under a scheduler that owns every thread and all time: nothing may hang, and every
//! rank must get the right error. A failing seed is printed; `MESHSTEP_FAULT_SEED=<seed>` replays exactly that run.
//!
//! Time passes only when no rank can run. So a deadline expires only if a rank is really missing, never because a thread was
//! slow, and the outcome of each program is known beforehand.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

mod judge;
mod program;
mod rank;
mod two_callers;

use judge::judge;
use meshstep_comm::{Clock, Error, loopback};
use program::{Program, Random, Trouble};
use rank::{Outcomes, Rank};
use shuttle::scheduler::{RandomScheduler, Schedule, Scheduler, Task, TaskId};
use shuttle::{FailurePersistence, Runner};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);
pub(crate) const DEADLINE: Duration = Duration::from_secs(10);
/// More time than any program here needs: a rank that still waits then hangs.
const END_OF_TIME: u32 = 500;

/// Runs one program: the ranks on their own threads, and time on this one.
fn simulate(seed: u64) {
    let mut random = Random(seed);
    let program = Arc::new(Program::random(&mut random));
    let (clock, ended) = (Clock::manual(), Arc::new(AtomicBool::new(false)));
    let world = {
        let (program, clock, ended) = (program.clone(), clock.clone(), ended.clone());
        shuttle::thread::spawn(move || {
            let results = run_ranks(&program, clock, &random);
            ended.store(true, SeqCst);
            results
        })
    };
    for _ in 0..END_OF_TIME {
        shuttle::thread::yield_now();
        if ended.load(SeqCst) {
            break;
        }
        // This thread runs when no other can: every rank waits here. A wait for time must be necessary.
        assert!(program.takes_time(), "a known failure is not reported at once: {program:?}");
        clock.advance(SECOND);
    }
    assert!(ended.load(SeqCst), "a rank hangs: {program:?}");
    let (result, outcomes) = world.join().unwrap();
    // Forgotten operations may still have to reach their deadlines; shuttle fails the run if any thread is left over then.
    (0..60).filter(|_| program.takes_time()).for_each(|_| clock.advance(SECOND));
    let panics = program.faults.iter().any(|fault| fault.trouble == Trouble::Panic);
    assert_eq!(result.is_err(), panics, "{result:?}");
    judge(&program, &outcomes);
}

fn run_ranks(program: &Program, clock: Clock, random: &Random) -> (Result<(), Error>, Vec<Outcomes>) {
    let outcomes = Mutex::new(vec![Vec::new(); program.ranks]);
    let faults = program.injected();
    let config =
        loopback::Config { timeout: DEADLINE, clock, faults, ..loopback::Config::new(program.ranks) };
    let result = loopback::spawn_with(config, |comm| {
        let (me, random) = (comm.rank(), Random(random.0 ^ comm.rank() as u64));
        let mut rank = Rank::new(comm, program, random);
        let lives = rank.run();
        outcomes.lock().unwrap()[me] = std::mem::take(&mut rank.outcomes);
        if !lives {
            resume_unwind(Box::new("as planned"));
        }
    });
    (result.map(drop), outcomes.into_inner().unwrap())
}

/// Scheduler that picks at random, but lets time pass only when nothing else can happen.
struct TimeStandsStill {
    random: RandomScheduler,
    next_seed: u64,
    last_seed: u64,
    current: Arc<AtomicU64>,
}

impl Scheduler for TimeStandsStill {
    fn new_execution(&mut self) -> Option<Schedule> {
        // Reports that its only execution is over; otherwise being replaced counts as a failure.
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

/// Runs `simulate` with seeds 0 to `count` - 1, or with that of `MESHSTEP_FAULT_SEED`; after a failure it prints the seed.
pub(crate) fn run_seeds(count: u32, simulate: fn(u64)) {
    let seed = std::env::var("MESHSTEP_FAULT_SEED").ok();
    let seed = seed.map(|seed| seed.parse::<u64>().expect("MESHSTEP_FAULT_SEED is a number"));
    let (first, last) = seed.map_or((0, u64::from(count) - 1), |seed| (seed, seed));
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
fn random_fault_schedules_end_as_they_must() {
    run_seeds(meshstep_cases::cases(1500, 200_000), simulate);
}
