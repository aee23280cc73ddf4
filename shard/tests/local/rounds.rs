//! Exchanges that workers who come and go do not hear of, send again, or have on both sides of updates.

use crate::common::{self, Run};
use crate::follow::{LONG, Vetoing, build, run};
use crate::replicas::{Part, Spoiling, connect, parts, step};
use meshstep_comm::{Clock, Communicator, loopback};
use meshstep_shard::local::membership::{
    Ballot, Config, Decision, Departure, Error, InProcess, InProcessWorker, Membership, Refusal, Round,
};
use meshstep_shard::local::{
    Fragment, LocalError, LocalOptimizer, LocalPlan, OnFailure, Placement, Select, Slots, Timing, What,
    Workers,
};
use meshstep_shard::{NonFinite, Stage};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const BOUND: Duration = Duration::from_secs(30);

/// Workers of `ranks` ranks that follow the same run: what `body` gives, by worker and rank.
fn follow_all<T: Send>(
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
    // Vetoed; in step 8 there is something before the update.
    expected[7].1 = 1;
    assert!(merged.iter().flatten().all(|merged| *merged == expected), "{merged:?}");
}

/// A membership whose exchanges from step 8 on fail until somebody has come.
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
    // Step after step, to the one at which somebody came; that one may have come about.
    let last = failed.last().copied().unwrap();
    assert!(
        *failed == (7..=last).collect::<Vec<_>>() && last <= entered && entered <= last + 1,
        "{failed:?}"
    );
    assert!(ends.iter().all(|(_, _, parts)| *parts == ends[0].2));
}

/// A membership that does not hear what becomes of the first exchange, on which it has voted or not.
#[derive(Debug)]
struct Deaf {
    member: Arc<InProcessWorker>,
    votes: bool,
    was_deaf: AtomicBool,
}

impl Membership for Deaf {
    fn boundary(&self, step: u64) -> Result<Round, Error> {
        self.member.boundary(step)
    }

    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, Error> {
        if round.step != 4 || self.was_deaf.swap(true, Relaxed) {
            return self.member.vote(round, ballot);
        }
        if self.votes {
            self.member.vote(round, ballot)?;
        }
        Err(Error::Unanswered { what: "a vote", after: LONG })
    }

    fn decided(&self, round: &Round) -> Option<Decision> {
        self.member.decided(round)
    }

    fn leave(&self) -> Result<(), Error> {
        self.member.leave()
    }
}

#[test]
fn who_has_not_heard_the_end_of_an_exchange_asks_and_goes_on_only_where_it_has_missed_nothing() {
    let (run, plan) = (run(), LocalPlan::local_adam(4));
    for votes in [true, false] {
        let all = follow_all(
            &run,
            &plan,
            [2, 2],
            |id, member| match id {
                1 => Arc::new(Deaf { member, votes, was_deaf: AtomicBool::new(false) }) as _,
                _ => member as _,
            },
            |id, mut local, connect| {
                let mut told = Vec::new();
                for _ in 0..8 {
                    if let Err(error) = local.follow(connect) {
                        return (told, Some(error), parts(&run, &local));
                    }
                    told.push(step(&run, &mut local, id));
                }
                (told, None, parts(&run, &local))
            },
        );
        for (told, error, parts) in &all[1] {
            let unheard = |told: &LocalError| matches!(told, LocalError::Membership(Error::Unanswered { what: "a vote", after }) if *after == LONG);
            assert!(told[3].as_ref().is_err_and(unheard), "{told:?}");
            if votes {
                assert!(matches!(error, Some(LocalError::Missed { step: 4 })), "{error:?}");
                continue;
            }
            assert!(error.is_none(), "{error:?}");
            assert_eq!(told[7].as_ref().unwrap().exchanged.merged, [0, 1, 2]);
            assert!(all[0].iter().any(|(.., others)| others == parts));
        }
        for (told, error, _) in &all[0] {
            assert!(error.is_none(), "{error:?}");
            let merged: Vec<usize> =
                (0..8).filter(|&i| !told[i].as_ref().unwrap().exchanged.merged.is_empty()).collect();
            assert_eq!(merged, if votes { vec![3, 7] } else { vec![7] });
        }
    }
}

#[test]
fn who_breaks_is_dropped_after_three_vetoes_and_the_others_are_not() {
    let mut run = run().stage(Stage::Zero1);
    run.options.non_finite = NonFinite::Propagate;
    let plan = LocalPlan::local_adam(2);
    let all = follow_all(
        &run,
        &plan,
        [3, 2],
        |_, member| member,
        |id, mut local, connect| {
            let mut merged = Vec::new();
            for t in 1..=8 {
                match local.follow(connect) {
                    Ok(_) => {}
                    Err(error) => return (t, Some(error), merged),
                }
                let mb = local.micro_batch(1).unwrap();
                for (i, &len) in run.lens.iter().enumerate() {
                    let mut grad = vec![id as f32; len];
                    // One number, which only one of the worker's ranks has a share of.
                    if (id, t, i) == (1, 1, 0) {
                        grad[0] = f32::NAN;
                    }
                    mb.grad(&common::name(i), &grad[..]).unwrap();
                }
                mb.finish().unwrap();
                merged.push(local.step(run.at(t)).unwrap().exchanged.merged.len());
            }
            (9, None, merged)
        },
    );
    for (id, ranks) in all.iter().enumerate() {
        for (t, error, merged) in ranks {
            if id != 1 {
                assert!(error.is_none() && *merged == [0, 0, 0, 0, 0, 0, 0, 3], "{id}: {error:?} {merged:?}");
                continue;
            }
            let Some(LocalError::Membership(Error::Refused(refusal))) = error else { panic!("{error:?}") };
            assert!(matches!(refusal, Refusal::Fenced { why: Some(Departure::Vetoed), .. }), "{refusal}");
            assert_eq!(*t, 8);
        }
    }
}

#[test]
fn who_cannot_take_its_step_is_no_reason_to_drop_others() {
    let (run, plan) = (run().stage(Stage::Zero1), LocalPlan::local_adam(2));
    let all = follow_all(
        &run,
        &plan,
        [2, 1],
        |_, member| member,
        |id, mut local, connect| {
            let mut told = Vec::new();
            for t in 1..=8 {
                if let Err(error) = local.follow(connect) {
                    return (t, error.to_string());
                }
                // Every exchange finds the one without gradients.
                let hands_over = id == 0 || t % 2 == 1;
                let mb = local.micro_batch(1).unwrap();
                for (i, &len) in run.lens.iter().enumerate().filter(|_| hands_over) {
                    mb.grad(&common::name(i), &vec![1.0f32; len][..]).unwrap();
                }
                mb.finish().unwrap();
                told.push(local.step(run.at(t)).map(|told| told.exchanged.merged.len()).unwrap_or(9));
            }
            (9, format!("{told:?}"))
        },
    );
    // The last exchange is of one worker alone.
    assert_eq!(all[0], [(9, "[0, 0, 0, 0, 0, 0, 0, 3]".to_owned())]);
    assert!(all[1][0].0 == 8 && all[1][0].1.contains("vetoed three exchanges"), "{:?}", all[1]);
}

/// What a rank merged and found failed, step by step, what it was told, and what it has.
type Told = (Vec<(usize, usize)>, String, Vec<Part>);

/// Two workers of two ranks, to which a third comes; one rank of worker `odd` gives up its communicator with it. By worker and
/// rank.
fn come_and_fail(odd: usize) -> Vec<Vec<Told>> {
    let (run, plan) = (run().stage(Stage::Zero2), LocalPlan::local_adam(2));
    let digest = plan.digest(&build(&run));
    let members = InProcess::new(Config::new(digest, 2), Clock::real()).unwrap();
    let comes = Barrier::new(3);
    // Nobody hears of one that is dropped.
    let kept = Mutex::new(Vec::new());
    let rank = |id: usize, comm: Arc<dyn Communicator>| {
        let rank = comm.rank();
        let connect = |round: &Round| match rank {
            1 if id == odd && round.members.len() == 3 => {
                drop(members.communicator(round, [rank, 2], LONG)?);
                Err(Error::NoSeat { epoch: round.epoch, rank: round.rank })
            }
            _ => connect(&members, round, [rank, 2]),
        };
        let inner = run.build(comm).unwrap();
        let joined = if rank == 0 {
            if id == 2 {
                comes.wait();
            }
            let member = Arc::new(members.join(id as u64, digest, LONG).unwrap());
            kept.lock().unwrap().push(Arc::clone(&member));
            LocalOptimizer::join(inner, plan.clone(), member, connect)
        } else {
            LocalOptimizer::join_through_rank0(inner, plan.clone(), connect)
        };
        let (mut merged, mut told) = (Vec::new(), String::new());
        let mut local = match joined {
            Ok(local) => local,
            Err(error) => return (merged, error.to_string(), Vec::new()),
        };
        // Two exchanges after it has come, in which all is well again.
        let mut left = 5;
        while left > 0 {
            if local.steps() == 3 && rank == 0 {
                comes.wait();
            }
            if let Err(error) = local.follow(connect) {
                told += &error.to_string();
            }
            let exchanged = step(&run, &mut local, id).unwrap().exchanged;
            merged.push((exchanged.merged.len(), exchanged.failed.len()));
            left -= usize::from(merged.iter().any(|(_, failed)| *failed > 0));
        }
        (merged, told, parts(&run, &local))
    };
    let worker = |id: usize| loopback::spawn(2, |comm| rank(id, comm)).unwrap();
    thread::scope(|scope| {
        let worker = &worker;
        let threads = [0, 1, 2].map(|id| scope.spawn(move || worker(id)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn who_cannot_connect_costs_the_others_one_exchange() {
    for odd in [1, 2] {
        let begin = Instant::now();
        let ends = come_and_fail(odd);
        assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
        let told = |id: usize| ends[id].iter().map(|(_, told, _)| &told[..]).collect::<Vec<_>>();
        // Each of its ranks has an error: its own.
        let [first, second] = [told(odd)[0], told(odd)[1]];
        assert!(
            first.contains("left before operation") && second.contains("no communicator"),
            "{:?}",
            told(odd)
        );
        // Who only wanted to come has to come again; to others it is a failed exchange.
        assert!(told(2).iter().all(|told| !told.is_empty()) && told(0) == ["", ""]);
        let merged = &ends[0][0].0;
        assert_eq!(merged[merged.len() - 5..], [(0, 3), (0, 0), (3, 0), (0, 0), (3, 0)], "{merged:?}");
        for (rank, (all, _, parts)) in ends[..2].concat().iter().enumerate() {
            assert!(all == merged && *parts == ends[0][rank % 2].2, "{odd}: rank {rank}");
        }
    }
}

#[test]
fn who_could_not_connect_once_goes_on_and_nobody_waits_for_it() {
    let (run, plan) = (run(), LocalPlan::local_adam(2));
    let begin = Instant::now();
    let all = follow_all(
        &run,
        &plan,
        [2, 1],
        // The first round, before there is anything to exchange, has failed: the first exchange is in an epoch of its own.
        |id, member| match id {
            0 => Arc::new(Spoiling { member, word: Ballot::Failed, spoiled: AtomicBool::new(false) }) as _,
            _ => member as _,
        },
        |id, mut local, connect| {
            let mut all = Vec::new();
            for _ in 0..6 {
                let followed = local.follow(|round| {
                    let workers = connect(round)?;
                    match (id, round.epoch) {
                        (1, 2) => Err(Error::NoSeat { epoch: 2, rank: round.rank }),
                        _ => Ok(workers),
                    }
                });
                let fine = followed.is_ok();
                let told = step(&run, &mut local, id).unwrap().exchanged;
                all.push((fine, told.merged.len(), told.failed.len()));
            }
            all
        },
    );
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    for (id, all) in all.concat().iter().enumerate() {
        let (calm, merged) = ((true, 0, 0), (true, 3, 0));
        assert_eq!(*all, [calm, (id == 0, 0, 3), calm, merged, calm, merged], "{id}");
    }
}

/// A membership that hears nothing of its first boundary.
#[derive(Debug)]
struct Unheard(Arc<InProcessWorker>);

impl Membership for Unheard {
    fn boundary(&self, _: u64) -> Result<Round, Error> {
        Err(Error::Unanswered { what: "a boundary", after: LONG })
    }

    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, Error> {
        self.0.vote(round, ballot)
    }

    fn decided(&self, round: &Round) -> Option<Decision> {
        self.0.decided(round)
    }

    fn leave(&self) -> Result<(), Error> {
        self.0.leave()
    }
}

#[test]
fn who_hears_nothing_of_its_first_boundary_has_left_and_may_join_anew() {
    let (run, plan) = (run().stage(Stage::Zero1), LocalPlan::local_adam(2));
    let digest = plan.digest(&build(&run));
    let members = InProcess::new(Config::new(digest, 2), Clock::real()).unwrap();
    let kept = Mutex::new(Vec::new());
    let rank = |id: usize, comm: Arc<dyn Communicator>| {
        let place = [comm.rank(), 2];
        let inside = comm.split(Some(0), 0).unwrap().unwrap();
        let connect = |round: &Round| connect(&members, round, place);
        let member = || Arc::new(members.join(id as u64, digest, LONG).unwrap());
        let join = |comm, member: &dyn Fn() -> Arc<dyn Membership>| match place[0] {
            0 => LocalOptimizer::join(run.build(comm).unwrap(), plan.clone(), member(), connect),
            _ => LocalOptimizer::join_through_rank0(run.build(comm).unwrap(), plan.clone(), connect),
        };
        if id == 0 {
            let unheard = || {
                let member = member();
                // Nobody hears of one that is dropped.
                kept.lock().unwrap().push(Arc::clone(&member));
                Arc::new(Unheard(member)) as Arc<dyn Membership>
            };
            let told = join(comm, &unheard).unwrap_err();
            assert!(matches!(told, LocalError::Membership(Error::Unanswered { .. })), "{told}");
        }
        let mut local = join(inside, &|| member() as _).unwrap();
        for _ in 0..4 {
            local.follow(connect).unwrap();
            let _ = step(&run, &mut local, id).unwrap();
        }
        parts(&run, &local)
    };
    let begin = Instant::now();
    let ends: Vec<_> = thread::scope(|scope| {
        let rank = &rank;
        let worker = |id: usize| loopback::spawn(2, |comm| rank(id, comm)).unwrap();
        let threads = [0, 1].map(|id| scope.spawn(move || worker(id)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    assert!(ends[0] == ends[1]);
}

/// First moments go off before updates and arrive two steps later, parameters are averaged after them: where that failed they are
/// sent again once a step has no other exchange. Of step 7 the arrival is given up as somebody comes.
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
        // Who was there tells what was given up.
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
