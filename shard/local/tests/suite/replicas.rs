//! Workers of several ranks that join, leave and lose ranks while they train: the others' state equals that of a loop over whole
//! vectors, as for workers of one rank.

use crate::common::{self, Run, draws};
use crate::follow::{LONG, alone_workers, build, mean, run, update};
use meshstep_comm::{Clock, Communicator, loopback};
use meshstep_local::{LocalError, LocalOptimizer, LocalPlan, LocalStep, Workers};
use meshstep_membership::{Ballot, Config, Decision, Error, InProcess, InProcessWorker, Membership, Round};
use meshstep_shard::{Error as ShardError, Stage, Step};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

/// Far below any deadline.
const BOUND: Duration = Duration::from_secs(30);

/// How the last of the first workers ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Goes {
    Leaves,
    /// All its ranks, between two exchanges.
    IsLost,
    /// While the others wait for the worker's contribution.
    IsLostWithin,
    /// Loses only this rank.
    LosesRank(usize),
    LosesRankWithin(usize),
}

/// Workers of a test.
#[derive(Clone, Copy, Debug)]
struct Cast {
    /// Number of workers at first.
    workers: usize,
    /// Ranks of each worker.
    ranks: usize,
    stage: Stage,
    goes: Goes,
    /// Ballot of the joining worker on its first exchange.
    first_word: Ballot,
}

/// A membership that casts another ballot on its first exchange.
#[derive(Debug)]
pub struct Spoiling {
    pub member: Arc<InProcessWorker>,
    pub word: Ballot,
    pub spoiled: AtomicBool,
}

impl Membership for Spoiling {
    fn boundary(&self, step: u64) -> Result<Round, Error> {
        self.member.boundary(step)
    }

    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, Error> {
        let word = if self.spoiled.swap(true, Relaxed) { ballot } else { self.word };
        self.member.vote(round, word)
    }

    fn decided(&self, round: &Round) -> Option<Decision> {
        self.member.decided(round)
    }

    fn leave(&self) -> Result<(), Error> {
        self.member.leave()
    }
}

/// Returns the communicators of one rank of a round's worker.
pub fn connect(members: &InProcess, round: &Round, place: [usize; 2]) -> Result<Workers, Error> {
    let world = members.communicator(round, place, LONG)?;
    let across = world.split(Some(place[0] as u32), round.rank as i64)?;
    Ok(Workers { world, across: across.unwrap() })
}

/// Takes a step, whatever fails in it.
pub fn step(run: &Run, local: &mut LocalOptimizer, id: usize) -> Result<LocalStep, LocalError> {
    let t = local.steps() + 1;
    let hand_over = |local: &mut LocalOptimizer| -> Result<(), LocalError> {
        let mb = local.micro_batch(1)?;
        for i in 0..run.lens.len() {
            let grad: Vec<f32> = run.gradient(t, 0, id, i).iter().map(|&g| g as f32).collect();
            mb.grad(&common::name(i), &grad[..])?;
        }
        Ok(mb.finish()?)
    };
    // The step returns the same error.
    let _ = hand_over(local);
    local.step(run.at(t))
}

/// State of a rank for one parameter: all of the parameter, and the rank's part of both moments.
pub type Part = (Vec<f32>, Range<usize>, Vec<Vec<f32>>);

pub fn parts(run: &Run, local: &LocalOptimizer) -> Vec<Part> {
    let part = |i: usize| {
        let state = local.state(&common::name(i)).unwrap();
        let slots = state.slots.iter().map(|(_, slot)| slot.typed::<f32>().unwrap().to_vec()).collect();
        (common::floats(local.optimizer(), &common::name(i)), state.range.clone(), slots)
    };
    (0..run.lens.len()).map(part).collect()
}

/// Returns true if the parts are those of whole vectors: each parameter, and both of its moments.
pub fn are_of(parts: &[Part], whole: &[Vec<f32>]) -> bool {
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    parts.iter().zip(whole.chunks(3)).all(|((params, range, slots), whole)| {
        let slots_are = |(slot, whole): (&Vec<f32>, &Vec<f32>)| bits(slot) == bits(&whole[range.clone()]);
        bits(params) == bits(&whole[0]) && (range.is_empty() || slots.iter().zip(&whole[1..]).all(slots_are))
    })
}

/// How a rank ended.
#[derive(Debug)]
enum Ended {
    /// At the end of the run, with this state.
    With(Vec<Part>),
    /// Without leaving.
    Gone,
    Failed(LocalError, Duration),
}

/// Runs all workers for 5 steps; then the last one ends, and another joins. All state is averaged every 4 steps. Returns the
/// results by worker and rank, and the first step of the new worker.
fn come_and_go(cast: Cast) -> (BTreeMap<(usize, usize), Ended>, u64) {
    let Cast { workers, ranks, stage, goes, first_word } = cast;
    let (run, plan) = (run().stage(stage), LocalPlan::local_adam(4));
    let digest = plan.digest(&build(&run));
    let members = InProcess::new(Config::new(digest, workers), Clock::real()).unwrap();
    let (comes, until) = (Barrier::new(workers + 1), AtomicU64::new(u64::MAX));
    // Memberships are kept to the end: a dropped one would be noticed by the others.
    let kept = std::sync::Mutex::new(Vec::new());
    let rank = |id: usize, comm: Arc<dyn Communicator>| {
        let (rank, new) = (comm.rank(), id == workers);
        let connect = |round: &Round| connect(&members, round, [rank, ranks]);
        let inner = run.build(comm).unwrap();
        let mut own = None;
        let joined = if rank == 0 {
            if new {
                comes.wait();
            }
            let member = Arc::new(members.join(id as u64, digest, LONG).unwrap());
            own = Some(Arc::clone(&member));
            if matches!(goes, Goes::LosesRank(1) | Goes::LosesRankWithin(1)) {
                kept.lock().unwrap().push(Arc::clone(&member));
            }
            let spoils = new && first_word != Ballot::Ready;
            let member: Arc<dyn Membership> = match spoils {
                true => Arc::new(Spoiling { member, word: first_word, spoiled: AtomicBool::new(false) }),
                false => member,
            };
            LocalOptimizer::join(inner, plan.clone(), member, connect)
        } else {
            LocalOptimizer::join_through_rank0(inner, plan.clone(), connect)
        };
        let mut local = joined.unwrap();
        if new {
            until.store(local.steps() + 9, Relaxed);
        }
        let goes = Some(goes).filter(|_| id + 1 == workers);
        while local.steps() < until.load(Relaxed) {
            if local.steps() == 5 && !new && rank == 0 {
                comes.wait();
            }
            let begin = Instant::now();
            match (goes, local.steps()) {
                (Some(Goes::IsLost), 5) => break,
                (Some(Goes::Leaves), 5) => {
                    own.iter().for_each(|member| member.leave().unwrap());
                    break;
                }
                (Some(Goes::LosesRank(lost)), 5) if lost == rank => return Ended::Gone,
                (Some(Goes::IsLostWithin), 7) => {
                    local.follow(connect).unwrap();
                    break;
                }
                (Some(Goes::LosesRankWithin(lost)), 7) if lost == rank => {
                    local.follow(connect).unwrap();
                    return Ended::Gone;
                }
                _ => {}
            }
            let stepped = local.follow(connect).map(drop).and_then(|()| step(&run, &mut local, id).map(drop));
            if let Err(error) = stepped {
                return Ended::Failed(error, begin.elapsed());
            }
        }
        Ended::With(parts(&run, &local))
    };
    let worker = |id: usize| {
        let all = loopback::spawn(ranks, |comm| rank(id, comm));
        all.unwrap().into_iter().enumerate().map(move |(rank, end)| ((id, rank), end)).collect::<Vec<_>>()
    };
    let ends = thread::scope(|scope| {
        let worker = &worker;
        let threads: Vec<_> = (0..=workers).map(|id| scope.spawn(move || worker(id))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    (ends, until.into_inner() - 8)
}

/// Compares the results with whole vectors in a loop.
fn check(cast: Cast) {
    let begin = Instant::now();
    let (ends, came) = come_and_go(cast);
    assert!(begin.elapsed() < BOUND, "{cast:?}: {:?}", begin.elapsed());
    assert!(came >= 8 && came % 4 == 0, "{cast:?}: {came}");
    let Cast { workers, goes, first_word, .. } = cast;
    let run = run();
    let first = crate::follow::has(
        &run,
        &LocalOptimizer::new(build(&run), alone_workers(), LocalPlan::local_adam(4)).unwrap(),
    );
    let within = matches!(goes, Goes::IsLostWithin | Goes::LosesRankWithin(_));
    let mut failed = Vec::new();
    failed.extend(within.then_some(8));
    failed.extend((first_word != Ballot::Ready).then_some(came));
    let mut all: BTreeMap<usize, _> = (0..workers).map(|id| (id, first.clone())).collect();
    let is = |id: usize, whole: &[Vec<f32>]| {
        let of_it = ends.iter().filter(|((worker, _), _)| *worker == id);
        of_it.for_each(|(rank, end)| match end {
            Ended::With(parts) => assert!(are_of(parts, whole), "{cast:?} {rank:?}, came at {came}"),
            // In time, and with a typed error of the ranks' communicator.
            Ended::Failed(LocalError::Shard(ShardError::Comm(_)), after) => assert!(*after < BOUND),
            Ended::Failed(error, _) => panic!("{cast:?} {rank:?}: {error}"),
            Ended::Gone => {}
        });
    };
    for t in 1..=came + 8 {
        all.iter_mut().for_each(|(id, has)| update(&run, has, *id, t));
        if t == if within { 7 } else { 5 } {
            is(workers - 1, &all.remove(&(workers - 1)).unwrap());
        }
        if t % 4 == 0 && !failed.contains(&t) {
            let mean = mean(&all.values().collect::<Vec<_>>());
            all.values_mut().for_each(|has| *has = mean.clone());
            // Its first successful exchange takes over the mean and adds nothing.
            if t >= came && !all.contains_key(&workers) {
                all.insert(workers, mean);
            }
        }
    }
    (0..=workers).filter(|id| *id + 1 != workers).for_each(|id| is(id, &all[&id]));
    let gone = ends.values().filter(|end| matches!(end, Ended::Gone)).count();
    let told = ends.values().filter(|end| matches!(end, Ended::Failed(..))).count();
    let lost = matches!(goes, Goes::LosesRank(_) | Goes::LosesRankWithin(_));
    assert_eq!((gone, told), if lost { (1, cast.ranks - 1) } else { (0, 0) }, "{cast:?}");
}

#[test]
fn sharded_workers_come_and_go_as_whole_ones_do() {
    let (all, mut drawn) = ([Goes::Leaves, Goes::IsLost, Goes::IsLostWithin], draws(1));
    for (i, stage) in [Stage::Zero1, Stage::Zero2].into_iter().enumerate() {
        for (j, goes) in all.into_iter().enumerate().filter(|_| drawn()) {
            let workers = 2 + (i + j) % 2;
            check(Cast { workers, ranks: 2, stage, goes, first_word: Ballot::Ready });
        }
    }
    check(Cast {
        workers: 2,
        ranks: 3,
        stage: Stage::Replicated,
        goes: Goes::Leaves,
        first_word: Ballot::Ready,
    });
    check(Cast { workers: 2, ranks: 2, stage: Stage::Zero3, goes: Goes::IsLost, first_word: Ballot::Ready });
}

#[test]
fn a_worker_that_loses_a_rank_is_lost_whole_and_soon() {
    for rank in [0, 1] {
        for goes in [Goes::LosesRank(rank), Goes::LosesRankWithin(rank)] {
            let stage = [Stage::Zero1, Stage::Zero2][rank];
            check(Cast { workers: 3, ranks: 2, stage, goes, first_word: Ballot::Ready });
        }
    }
}

#[test]
fn who_comes_counts_after_an_exchange_that_has_come_about_not_one_that_has_failed() {
    for first_word in [Ballot::Veto, Ballot::Failed] {
        for (ranks, stage) in [(1, Stage::Zero1), (2, Stage::Zero2)] {
            check(Cast { workers: 3, ranks, stage, goes: Goes::Leaves, first_word });
        }
    }
}
