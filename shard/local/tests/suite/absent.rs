//! Workers that get no decision on an exchange, break, or cannot connect: the cost to them, and the small cost to the others.

use crate::common;
use crate::follow::{LONG, build, run};
use crate::replicas::{Part, Spoiling, connect, parts, step};
use crate::rounds::{BOUND, follow_all};
use meshstep_comm::{Clock, Communicator, loopback};
use meshstep_local::{LocalError, LocalOptimizer, LocalPlan};
use meshstep_membership::{
    Ballot, Config, Decision, Departure, Error, InProcess, InProcessWorker, Membership, Refusal, Round,
};
use meshstep_shard::{NonFinite, Stage, Step};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Instant;

/// A membership that gets no decision on the first exchange; `votes` is true if its vote has arrived.
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
                    // One element, which only one of the worker's ranks owns.
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
                // Every exchange falls on a step in which worker 1 has no gradients.
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
    // Worker 0 makes the last exchange alone.
    assert_eq!(all[0], [(9, "[0, 0, 0, 0, 0, 0, 0, 3]".to_owned())]);
    assert!(all[1][0].0 == 8 && all[1][0].1.contains("vetoed three exchanges"), "{:?}", all[1]);
}

/// Counts of merged and failed fragments step by step, error texts, and final state of a rank.
type Told = (Vec<(usize, usize)>, String, Vec<Part>);

/// Two workers of two ranks, and a third that joins; one rank of worker `odd` drops its communicator of that epoch. Returns the
/// results by worker and rank.
fn come_and_fail(odd: usize) -> Vec<Vec<Told>> {
    let (run, plan) = (run().stage(Stage::Zero2), LocalPlan::local_adam(2));
    let digest = plan.digest(&build(&run));
    let members = InProcess::new(Config::new(digest, 2), Clock::real()).unwrap();
    let comes = Barrier::new(3);
    // Memberships are kept: a dropped one would be noticed by the others.
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
        // Two successful exchanges after the third worker has tried to join.
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
        // Each rank of the odd worker has its own error.
        let [first, second] = [told(odd)[0], told(odd)[1]];
        assert!(
            first.contains("left before operation") && second.contains("no communicator"),
            "{:?}",
            told(odd)
        );
        // A worker that failed to join has to join again; the others see a failed exchange.
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
        // The first round, before the first step, fails, so the first exchange is in a new epoch.
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

/// A membership that gets no answer at its first boundary.
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
                // Memberships are kept: a dropped one would be noticed by the others.
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
