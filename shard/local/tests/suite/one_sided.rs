//! Failures of a single rank that the others cannot see: no other rank waits for it until a deadline.

use crate::common::{draws, turns};
use crate::follow::{LONG, build, run};
use crate::replicas::{Part, Spoiling, connect, parts, step};
use meshstep_comm::{Clock, Communicator, Error as CommError, InFlight, Op, Stats, loopback};
use meshstep_local::{LocalOptimizer, LocalPlan, Workers};
use meshstep_membership::{Ballot, Config, InProcess, Round};
use meshstep_shard::Stage;
use meshstep_tensor::{Buffer, Queue};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Far below any deadline.
const BOUND: Duration = Duration::from_secs(20);

/// A rank's communicator on which one operation fails, although it has succeeded on all ranks.
#[derive(Debug)]
struct Unlucky {
    comm: Arc<dyn Communicator>,
    /// Operations until the failure, counted over all communicators of the rank.
    left: Arc<AtomicI64>,
}

impl Unlucky {
    fn workers(Workers { world, across }: Workers, operation: i64) -> Workers {
        let left = Arc::new(AtomicI64::new(operation));
        let of = |comm| Arc::new(Unlucky { comm, left: Arc::clone(&left) }) as Arc<dyn Communicator>;
        Workers { world: of(world), across: of(across) }
    }
}

impl Communicator for Unlucky {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, CommError)> {
        let started = self.comm.start(op, buffer, after)?;
        if self.left.fetch_sub(1, Relaxed) != 0 {
            return Ok(started);
        }
        let (buffer, _) = started.wait(after);
        Err((buffer, CommError::Remote { rank: self.rank(), message: "its line is broken".to_owned() }))
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        let split = self.comm.split(color, key)?;
        let of = |comm| Arc::new(Unlucky { comm, left: Arc::clone(&self.left) }) as Arc<dyn Communicator>;
        Ok(split.map(of))
    }

    fn abort(&self) {
        self.comm.abort();
    }

    fn stats(&self) -> Stats {
        self.comm.stats()
    }
}

/// The rank and operation that fails.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Ranks of each worker.
    ranks: usize,
    /// True if a third worker joins; otherwise the same two workers get new communicators.
    comes: bool,
    /// Index among all ranks; the ranks of a joining worker come last.
    unlucky: usize,
    operation: i64,
}

/// Counts of merged and failed fragments by step, and the final state of the rank.
type Ended = (Vec<(usize, usize)>, Vec<Part>);

/// Runs two workers with new communicators at their first exchange, and one failing operation. Returns the results of each rank by
/// worker, `None` if it could not join, and true if the operation was part of the takeover of the communicators.
fn with_new_communicators(case: Case) -> (Vec<Vec<Option<Ended>>>, bool) {
    let Case { ranks, comes, unlucky, operation } = case;
    let (run, plan) = (run().stage(Stage::Zero1), LocalPlan::local_adam(2));
    let digest = plan.digest(&build(&run));
    let members = InProcess::new(Config::new(digest, 2), Clock::real()).unwrap();
    // Communicators are kept: dropping one means leaving it.
    let (kept, refused, begins) = (Mutex::new(Vec::new()), AtomicBool::new(false), Barrier::new(3));
    let rank = |id: usize, comm: Arc<dyn Communicator>| {
        let place = [comm.rank(), ranks];
        let take = |round: &Round| {
            let workers = connect(&members, round, place)?;
            kept.lock().unwrap().push(workers.clone());
            let has_it = round.epoch == 2 && workers.world.rank() == unlucky;
            Ok(if has_it { Unlucky::workers(workers, operation) } else { workers })
        };
        let inner = run.build(comm).unwrap();
        let joined = match place[0] {
            0 => {
                if id == 2 {
                    begins.wait();
                }
                let member = Arc::new(members.join(id as u64, digest, LONG).unwrap());
                let spoiled = AtomicBool::new(comes || id == 1);
                let member = Arc::new(Spoiling { member, word: Ballot::Failed, spoiled });
                LocalOptimizer::join(inner, plan.clone(), member, take)
            }
            _ => LocalOptimizer::join_through_rank0(inner, plan.clone(), take),
        };
        let Ok(mut local) = joined else {
            refused.store(true, Relaxed);
            return None;
        };
        let mut told = Vec::new();
        while local.steps() < 6 {
            let first = local.steps() == 1;
            if comes && first && id < 2 && place[0] == 0 {
                begins.wait();
                while id == 0 && !members.waiting().contains(&2) {
                    thread::yield_now();
                }
            }
            let met = local.follow(take).unwrap().is_some();
            refused.fetch_or(first && !met, Relaxed);
            let exchanged = step(&run, &mut local, id).unwrap().exchanged;
            told.push((exchanged.merged.len(), exchanged.failed.len()));
        }
        Some((told, parts(&run, &local)))
    };
    let ends = thread::scope(|scope| {
        let rank = &rank;
        let worker = |id: usize| loopback::spawn(ranks, |comm| rank(id, comm)).unwrap();
        let ids = 0..if comes { 3 } else { 2 };
        let threads: Vec<_> = ids.map(|id| scope.spawn(move || worker(id))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    (ends, refused.into_inner())
}

/// Returns how many operations can fail with an effect on the first exchange: during the takeover of the communicators, and after
/// it.
fn costs(ranks: usize, comes: bool, unlucky: usize) -> [usize; 2] {
    let mut costs = [0; 2];
    for operation in 0.. {
        let case = Case { ranks, comes, unlucky, operation };
        let begin = Instant::now();
        let (ends, refused) = with_new_communicators(case);
        assert!(begin.elapsed() < BOUND, "{case:?}: {:?}", begin.elapsed());
        let told = ends[0][0].as_ref().unwrap().0.clone();
        // The failing operation was of a later exchange, or not reached.
        if told[1] == (3, 0) {
            return costs;
        }
        costs[usize::from(refused)] += 1;
        assert_eq!(told, [(0, 0), (0, 3), (0, 0), (3, 0), (0, 0), (3, 0)], "{case:?}");
        for (id, worker) in ends.iter().enumerate() {
            for (rank, end) in worker.iter().enumerate() {
                let Some((all, parts)) = end else {
                    assert!(id == 2 && refused, "{case:?}");
                    continue;
                };
                assert_eq!(all[..], told[6 - all.len()..], "{case:?}, worker {id}");
                assert!(*parts == ends[0][rank].as_ref().unwrap().1, "{case:?}, worker {id}");
            }
        }
    }
    costs
}

#[test]
fn whichever_operation_fails_on_one_rank_costs_one_exchange_at_most_and_nobody_waits_long() {
    let mut drawn = draws(1);
    for ranks in [1, 2] {
        // Two operations for the takeover, then an agreement, a mean and a vote.
        let all: &[usize] = if ranks == 1 { &[1, 0] } else { &[0, 3, 1, 2] };
        for unlucky in turns(all, 0, ranks as u32).filter(|_| drawn()) {
            assert_eq!(costs(ranks, false, unlucky), [3, 2], "{ranks} {unlucky}");
        }
    }
    // A joining worker takes over each vector of each bucket, and the counts.
    for unlucky in turns(&[4, 1], 0, 1).filter(|_| drawn()) {
        let [exchange, takes] = costs(2, true, unlucky);
        assert!(exchange == 3 && takes >= 6, "{unlucky}: {takes}");
    }
}
