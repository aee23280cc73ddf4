//! Exchanges of elastic workers that are sent again, or on both sides of updates.

use crate::common::{self, Run};
use crate::follow::{LONG, Vetoing, build, run};
use crate::replicas::{Part, connect, parts, step};
use meshstep_comm::{Clock, loopback};
use meshstep_local::{
    Fragment, LocalOptimizer, LocalPlan, OnFailure, Placement, Select, Slots, Timing, What, Workers,
};
use meshstep_membership::{Ballot, Config, Decision, Error, InProcess, InProcessWorker, Membership, Round};
use meshstep_shard::{Stage, Step};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

pub const BOUND: Duration = Duration::from_secs(30);

/// Runs workers of `ranks` ranks in the same run; returns the results of `body` by worker and rank.
pub fn follow_all<T: Send>(
    run: &Run,
    plan: &LocalPlan,
    [workers, ranks]: [usize; 2],
    wrap: impl Fn(usize, Arc<InProcessWorker>) -> Arc<dyn Membership> + Sync,
    body: impl Fn(usize, LocalOptimizer, &dyn Fn(&Round) -> Result<Workers, Error>) -> T + Sync,
) -> Vec<Vec<T>> {
    let digest = plan.digest(&build(run));
    let members = InProcess::new(Config::new(digest, workers), Clock::real()).unwrap();
    let worker = |id: usize| {
        let all = loopback::spawn(ranks, |comm| {
            let place = [comm.rank(), ranks];
            let connect = |round: &Round| connect(&members, round, place);
            let inner = run.build(comm).unwrap();
            let local = match place[0] {
                0 => {
                    let member = Arc::new(members.join(id as u64, digest, LONG).unwrap());
                    LocalOptimizer::join(inner, plan.clone(), wrap(id, member), connect)
                }
                _ => LocalOptimizer::join_through_rank0(inner, plan.clone(), connect),
            };
            body(id, local.unwrap(), &connect)
        });
        all.unwrap()
    };
    thread::scope(|scope| {
        let worker = &worker;
        let threads: Vec<_> = (0..workers).map(|id| scope.spawn(move || worker(id))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// First moments before updates, second ones too but half as often, parameters after them.
fn both_sides() -> LocalPlan {
    LocalPlan::des_loc(4, 4, 8).with(|f| match f.what {
        What::Params => f.on_failure = OnFailure::Retry,
        _ => f.timing.placement = Placement::Before,
    })
}

/// The second of three workers skips the first boundary, and asks for the next one.
#[test]
fn a_worker_out_of_step_is_fenced_and_the_others_exchange() {
    let (run, plan) = (run(), LocalPlan::local_sgd(4));
    let told = follow_all(
        &run,
        &plan,
        [3, 1],
        |_, member| member,
        |id, mut local, connect| {
            let mut merged = 0;
            for at in 0..9 {
                if id != 1 || at > 4 {
                    match local.follow(connect) {
                        Ok(round) => assert!(round.is_none_or(|round| round.divisor() == 2)),
                        Err(error) => return (at, merged, error.to_string()),
                    }
                }
                merged += step(&run, &mut local, id).unwrap().exchanged.merged.len();
            }
            (9, merged, String::new())
        },
    );
    let [first, second, third] = [0, 1, 2].map(|id| &told[id][0]);
    assert_eq!((first, third), (&(9, 2, String::new()), &(9, 2, String::new())));
    assert_eq!((second.0, second.1), (7, 0));
    assert!(second.2.contains("it was at step 8 where most members were at step 4"), "{second:?}");
}

#[test]
fn what_is_exchanged_before_and_after_updates_is_as_without_a_membership() {
    for ranks in [1, 2] {
        let (run, plan) = (run().stage(Stage::Zero2), both_sides());
        let expected = loopback::spawn(2 * ranks, |world| {
            let id = world.rank() / ranks;
            let (comm, workers) = Workers::split(world, id as u32).unwrap();
            let mut local = LocalOptimizer::new(run.build(comm).unwrap(), workers, plan.clone()).unwrap();
            (0..13).for_each(|_| drop(step(&run, &mut local, id).unwrap()));
            parts(&run, &local)
        });
        let followed = follow_all(
            &run,
            &plan,
            [2, ranks],
            |_, member| member,
            |id, mut local, connect| {
                for _ in 0..13 {
                    local.follow(connect).unwrap();
                    let _ = step(&run, &mut local, id).unwrap();
                }
                parts(&run, &local)
            },
        );
        assert!(followed.concat() == expected.unwrap());
    }
}

#[test]
fn what_is_sent_again_waits_for_a_step_that_has_its_side_free() {
    let (run, plan) = (run(), both_sides());
    let merged = follow_all(
        &run,
        &plan,
        [2, 2],
        |id, member| Arc::new(Vetoing { member, step: if id == 1 { 8 } else { u64::MAX } }),
        |id, mut local, connect| {
            let mut all = Vec::new();
            for _ in 0..12 {
                local.follow(connect).unwrap();
                let told = step(&run, &mut local, id).unwrap().exchanged;
                all.push((told.merged, told.failed.len()));
            }
            all
        },
    );
    let mut expected = vec![(Vec::new(), 0); 12];
    for (step, merged) in
        [(0, vec![1, 2]), (3, vec![0]), (4, vec![1]), (8, vec![1, 2]), (9, vec![0]), (11, vec![0])]
    {
        expected[step].0 = merged;
    }
    // The exchange after step 7 was vetoed; step 8 has an exchange before its update.
    expected[7].1 = 1;
    assert!(merged.iter().flatten().all(|merged| *merged == expected), "{merged:?}");
}

/// A membership that gives up its boundary of step 4, and is granted that round when it asks for step 8.
#[derive(Debug)]
struct GivingUp {
    member: Arc<InProcessWorker>,
    gave_up: AtomicBool,
}

impl Membership for GivingUp {
    fn boundary(&self, step: u64) -> Result<Round, Error> {
        if step == 4 {
            self.gave_up.store(true, Relaxed);
            return Err(Error::Alone { step, left: 8 });
        }
        self.member.boundary(if self.gave_up.swap(false, Relaxed) { 4 } else { step })
    }

    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, Error> {
        self.member.vote(round, ballot)
    }

    fn decided(&self, round: &Round) -> Option<Decision> {
        self.member.decided(round)
    }

    fn leave(&self) -> Result<(), Error> {
        self.member.leave()
    }
}

#[test]
fn a_round_that_was_given_up_is_ended_and_not_exchanged_at_a_later_step() {
    for ranks in [1, 2] {
        let (run, plan) = (run(), LocalPlan::local_sgd(4));
        let told = follow_all(
            &run,
            &plan,
            [2, ranks],
            |id, member| match id {
                0 => member,
                _ => Arc::new(GivingUp { member, gave_up: AtomicBool::new(false) }),
            },
            |id, mut local, connect| {
                let mut all = Vec::new();
                for _ in 0..8 {
                    let epoch = local.follow(connect).unwrap().map(|round| round.epoch);
                    let told = step(&run, &mut local, id).unwrap().exchanged;
                    all.push((epoch, told.merged.len(), told.failed.len()));
                }
                (all, parts(&run, &local))
            },
        );
        for (id, ranks) in told.iter().enumerate() {
            for (all, parts) in ranks {
                // Worker 1 takes step 4 alone, so that the exchange fails; step 8 has new communicators.
                let fourth = (if id == 0 { Some(1) } else { None }, 0, 1);
                assert_eq!((all[3], all[7]), (fourth, (Some(2), 1, 0)), "worker {id}: {all:?}");
                let params = |parts: &[Part]| parts.iter().map(|part| part.0.clone()).collect::<Vec<_>>();
                assert_eq!(params(parts), params(&told[0][0].1), "worker {id}");
            }
        }
    }
}

/// A membership with exchanges that fail from step 8 on until a worker has joined.
#[derive(Debug)]
struct Failing {
    member: Arc<InProcessWorker>,
    came: Arc<AtomicBool>,
}

impl Membership for Failing {
    fn boundary(&self, step: u64) -> Result<Round, Error> {
        self.member.boundary(step)
    }

    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, Error> {
        let fails = round.step >= 8 && !self.came.load(Relaxed);
        self.member.vote(round, if fails { Ballot::Failed } else { ballot })
    }

    fn decided(&self, round: &Round) -> Option<Decision> {
        self.member.decided(round)
    }

    fn leave(&self) -> Result<(), Error> {
        self.member.leave()
    }
}

#[test]
fn who_comes_while_something_is_sent_again_sends_it_too() {
    let (run, plan) = (run(), LocalPlan::local_adam(4).with(|f| f.on_failure = OnFailure::Retry));
    let digest = plan.digest(&build(&run));
    let members = InProcess::new(Config::new(digest, 2), Clock::real()).unwrap();
    let (came, comes, until) = (Arc::new(AtomicBool::new(false)), Barrier::new(3), AtomicU64::new(u64::MAX));
    let worker = |id: usize| {
        if id == 2 {
            comes.wait();
        }
        let member = Arc::new(members.join(id as u64, digest, LONG).unwrap());
        let followed: Arc<dyn Membership> = match id {
            0 => Arc::new(Failing { member, came: Arc::clone(&came) }),
            _ => member,
        };
        let connect = |round: &Round| connect(&members, round, [0, 1]);
        let mut local = LocalOptimizer::join(build(&run), plan.clone(), followed, connect).unwrap();
        if id == 2 {
            until.store((local.steps() + 12) / 4 * 4, Relaxed);
            came.store(true, Relaxed);
        }
        let entered = local.steps();
        let mut failed = Vec::new();
        while local.steps() < until.load(Relaxed) {
            if local.steps() == 9 && id < 2 {
                comes.wait();
            }
            local.follow(connect).unwrap();
            let told = step(&run, &mut local, id).unwrap();
            failed.extend((!told.exchanged.failed.is_empty()).then_some(told.step));
        }
        (entered, failed, parts(&run, &local))
    };
    let begin = Instant::now();
    let ends: Vec<_> = thread::scope(|scope| {
        let worker = &worker;
        let threads = [0, 1, 2].map(|id| scope.spawn(move || worker(id)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    let (entered, failed) = (ends[2].0, &ends[0].1);
    // Consecutive steps up to the one at which the worker joined; that last exchange may have succeeded.
    let last = failed.last().copied().unwrap();
    assert!(
        *failed == (7..=last).collect::<Vec<_>>() && last <= entered && entered <= last + 1,
        "{failed:?}"
    );
    assert!(ends.iter().all(|(_, _, parts)| *parts == ends[0].2));
}

/// First moments are sent before updates and arrive two steps later; parameters are averaged after updates. Parameters of a failed
/// exchange are sent again in a step without another exchange. The arrival in step 7 is given up as a worker joins.
#[test]
fn what_waits_for_an_arrival_is_sent_again_where_that_is_given_up_for_one_who_comes() {
    let moments = Timing { offset: 1, delay: 2, placement: Placement::Before, ..Timing::every(4) };
    let mut plan = LocalPlan::new(vec![
        Fragment::mean(What::State(Slots::First), moments),
        Fragment::mean(What::Params, Timing { offset: 3, ..Timing::every(4) }),
    ]);
    plan.fragments[1].on_failure = OnFailure::Retry;
    let run = run();
    let digest = plan.digest(&build(&run));
    let members = InProcess::new(Config::new(digest, 2), Clock::real()).unwrap();
    let comes = Barrier::new(3);
    let worker = |id: usize| {
        if id == 2 {
            comes.wait();
        }
        let member = Arc::new(members.join(id as u64, digest, LONG).unwrap());
        let step_vetoed = if id == 1 { 7 } else { u64::MAX };
        let followed = Arc::new(Vetoing { member, step: step_vetoed });
        let connect = |round: &Round| connect(&members, round, [0, 1]);
        let mut local = LocalOptimizer::join(build(&run), plan.clone(), followed, connect).unwrap();
        let mut told = Vec::new();
        while local.steps() < 9 {
            if local.steps() == 7 && id < 2 {
                comes.wait();
                while id == 0 && !members.waiting().contains(&2) {
                    thread::yield_now();
                }
            }
            local.follow(connect).unwrap();
            let step = step(&run, &mut local, id).unwrap();
            let failed: Vec<usize> = step.exchanged.failed.iter().map(|(f, _)| *f).collect();
            told.push((step.step, step.exchanged.merged, failed, step.exchanged.given_up));
        }
        told
    };
    let begin = Instant::now();
    let ends: Vec<_> = thread::scope(|scope| {
        let worker = &worker;
        let threads = [0, 1, 2].map(|id| scope.spawn(move || worker(id)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    for (id, told) in ends.iter().enumerate() {
        let at = |step: u64| {
            let told = told.iter().find(|(at, ..)| *at == step);
            told.map(|(_, merged, failed, given_up)| (&merged[..], &failed[..], &given_up[..]))
        };
        if id < 2 {
            assert_eq!(at(6), Some((&[][..], &[1][..], &[][..])), "{id}: {told:?}");
        } else {
            assert_eq!(told[0].0, 7);
        }
        // The old workers report what was given up.
        let given_up: &[usize] = if id < 2 { &[0] } else { &[] };
        assert_eq!(at(7), Some((&[1][..], &[][..], given_up)), "{id}: {told:?}");
        assert_eq!(at(8), Some((&[][..], &[][..], &[][..])), "{id}: {told:?}");
    }
}

#[test]
fn without_asking_nothing_is_exchanged() {
    let (run, plan) = (run(), LocalPlan::local_adam(2));
    let all = follow_all(
        &run,
        &plan,
        [2, 1],
        |_, member| member,
        |id, mut local, connect| {
            let mut told = Vec::new();
            for t in 0..4 {
                if t != 1 {
                    local.follow(connect).unwrap();
                }
                told.push(step(&run, &mut local, id).unwrap().exchanged);
            }
            told.iter().map(|told| (told.merged.len(), told.failed.len())).collect::<Vec<_>>()
        },
    );
    assert!(all.concat().iter().all(|told| *told == [(0, 0), (0, 3), (0, 0), (3, 0)]), "{all:?}");
}

#[test]
fn what_only_one_rank_of_a_worker_has_reaches_the_others_in_a_skipped_step_too() {
    let run = run().stage(Stage::Zero1);
    for range in [0..10, 120..130] {
        let elements = Select::Elements { name: common::name(3), range };
        let plan = LocalPlan::new(vec![Fragment {
            params: elements,
            ..Fragment::mean(What::Params, Timing::every(2))
        }]);
        let ends = loopback::spawn(4, |world| {
            let id = world.rank() / 2;
            let (comm, workers) = Workers::split(world, id as u32).unwrap();
            let mut local = LocalOptimizer::new(run.build(comm).unwrap(), workers, plan.clone()).unwrap();
            let _ = step(&run, &mut local, id).unwrap();
            let mb = local.micro_batch(1).unwrap();
            for (i, &len) in run.lens.iter().enumerate() {
                mb.grad(&common::name(i), &vec![if id == 0 { f32::NAN } else { 1.0 }; len][..]).unwrap();
            }
            mb.finish().unwrap();
            let told = local.step(run.at(2)).unwrap();
            assert_eq!(told.exchanged.merged, [0]);
            common::floats(local.optimizer(), &common::name(3))
        });
        let ends = ends.unwrap();
        assert!(ends[0] == ends[1] && ends[2] == ends[3]);
    }
}
