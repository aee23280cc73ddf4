//! Workers that join, leave and are lost while they train: the others' state equals that of a loop over whole vectors.

use crate::common::{self, Gradients, Run, WhichRule};
use meshstep_comm::{Clock, Communicator, Faults, loopback};
use meshstep_local::{Exchanged, LocalError, LocalOptimizer, LocalPlan, Veto, Workers};
use meshstep_membership::{
    Ballot, Config, Decision, Digest, Error, InProcess, InProcessWorker, Membership, Refusal, Round,
};
use meshstep_shard::{Optimizer, Stage, Step};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

pub const LONG: Duration = Duration::from_secs(60);

pub fn run() -> Run {
    Run { rule: WhichRule::AdamW, gradients: Gradients::Rough, max_norm: None, ..Run::default() }
        .stage(Stage::Zero1)
}

pub fn alone() -> Arc<dyn Communicator> {
    let config = loopback::Config { ranks: 1, timeout: LONG, clock: Clock::real(), faults: Faults::none() };
    loopback::world(config).unwrap().remove(0)
}

pub fn build(run: &Run) -> Optimizer {
    run.build(alone()).unwrap()
}

pub fn workers(member: &InProcessWorker, round: &Round) -> Result<Workers, Error> {
    let world = member.communicator(round, LONG)?;
    Ok(Workers { across: Arc::clone(&world), world })
}

/// A worker's values of a parameter, and both its moments.
pub type Has = Vec<Vec<f32>>;

pub fn has(run: &Run, local: &LocalOptimizer) -> Has {
    let mut all = Vec::new();
    for i in 0..run.lens.len() {
        all.push(common::floats(local.optimizer(), &common::name(i)));
        let state = local.state(&common::name(i)).unwrap();
        let mut slots: Vec<Vec<f32>> =
            state.slots.iter().map(|(_, slot)| slot.typed::<f32>().unwrap().to_vec()).collect();
        // Empty parameters have no state.
        slots.resize(2, Vec::new());
        all.extend(slots);
    }
    all
}

/// Takes one step of worker `id`; returns the round's divisor and the number of merged fragments.
pub fn step(run: &Run, local: &mut LocalOptimizer, member: &InProcessWorker, id: usize) -> (usize, usize) {
    let (divisor, exchanged) = exchange(run, local, member, id);
    (divisor, exchanged.merged.len())
}

/// Takes one step of worker `id`; returns the round's divisor and what became of the fragments.
fn exchange(
    run: &Run,
    local: &mut LocalOptimizer,
    member: &InProcessWorker,
    id: usize,
) -> (usize, Exchanged) {
    let round = local.follow(|round| workers(member, round)).unwrap();
    let counts = round.map_or(0, Round::divisor);
    let t = local.steps() + 1;
    let mb = local.micro_batch(1).unwrap();
    for i in 0..run.lens.len() {
        let grad: Vec<f32> = run.gradient(t, 0, id, i).iter().map(|&g| g as f32).collect();
        mb.grad(&common::name(i), &grad[..]).unwrap();
    }
    mb.finish().unwrap();
    (counts, local.step(run.at(t)).unwrap().exchanged)
}

/// Takes a step of one worker alone: the rule over whole vectors.
pub fn update(run: &Run, has: &mut Has, id: usize, t: u64) {
    use meshstep_optim::{Flat, Scalars, Segment};
    use meshstep_tensor::{Queue, SliceMut};
    let rule = run.boxed_rule();
    for (i, vectors) in has.chunks_mut(3).enumerate() {
        let mut grads: Vec<f32> = run.gradient(t, 0, id, i).iter().map(|&g| g as f32).collect();
        let (params, state) = vectors.split_first_mut().unwrap();
        let mut slots: Vec<SliceMut<'_>> =
            state.iter_mut().map(|slot| SliceMut::from(&mut slot[..])).collect();
        let (n, params) = (params.len(), SliceMut::from(&mut params[..]));
        let flat = Flat {
            params,
            grads: SliceMut::from(&mut grads[..]),
            state: &mut slots,
            copy: None,
            remainder: None,
        };
        let scalars = Scalars { lr: run.at(t).lr, ..Scalars::default() };
        rule.update(flat, &[Segment::new(0..n, t)], &scalars, &Queue::cpu()).unwrap();
    }
}

pub fn mean(all: &[&Has]) -> Has {
    let element = |k: usize, j: usize| {
        (all.iter().map(|has| f64::from(has[k][j])).sum::<f64>() / all.len() as f64) as f32
    };
    (0..all[0].len()).map(|k| (0..all[0][k].len()).map(|j| element(k, j)).collect()).collect()
}

/// How worker 2 ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Goes {
    Leaves,
    /// Between two exchanges, without leaving.
    IsLost,
    /// While the others wait for the worker's contribution.
    IsLostWithin,
}

/// Final state of a worker, and the divisor at each step.
type Ended = (Has, Vec<usize>);

/// Runs three workers, of which one ends after 5 steps, and one that joins then; all state is averaged every 4 steps. Returns the
/// final states by worker, and the first step of the new worker.
fn come_and_go(goes: Goes) -> (BTreeMap<usize, Ended>, u64) {
    let (run, plan) = (run(), LocalPlan::local_adam(4));
    let digest = plan.digest(&build(&run));
    let members = InProcess::new(Config::new(digest, 3), Clock::real()).unwrap();
    let (comes, until) = (Barrier::new(4), AtomicU64::new(u64::MAX));
    let worker = |id: usize| {
        if id == 3 {
            comes.wait();
        }
        let member = Arc::new(members.join(id as u64, digest, LONG).unwrap());
        let connect = |round: &Round| workers(&member, round);
        let mut local =
            LocalOptimizer::join(build(&run), plan.clone(), Arc::clone(&member) as _, connect).unwrap();
        if id == 3 {
            // The others wait for the new worker at the next exchange.
            until.store(local.steps() + 9, Relaxed);
        }
        let mut divisors = Vec::new();
        while local.steps() < until.load(Relaxed) {
            if local.steps() == 5 && id < 3 {
                comes.wait();
            }
            if id == 2 && local.steps() == if goes == Goes::IsLostWithin { 7 } else { 5 } {
                match goes {
                    Goes::Leaves => member.leave().unwrap(),
                    Goes::IsLost => {}
                    Goes::IsLostWithin => drop(local.follow(connect).unwrap()),
                }
                break;
            }
            let (divisor, exchanged) = exchange(&run, &mut local, &member, id);
            // All survivors name the lost worker, whichever collective failed on each of them.
            let vetoes = exchanged.failed.iter().map(|(_, veto)| *veto);
            assert!(vetoes.clone().all(|veto| veto == Veto::Lost { worker: 2 }), "{:?}", exchanged.failed);
            assert_eq!(vetoes.len() > 0, goes == Goes::IsLostWithin && local.steps() == 8, "{exchanged:?}");
            divisors.push(divisor);
        }
        (id, (has(&run, &local), divisors))
    };
    let ends = thread::scope(|scope| {
        let worker = &worker;
        let threads: Vec<_> = (0..4).map(|id| scope.spawn(move || worker(id))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    (ends, until.into_inner() - 8)
}

#[test]
fn who_comes_and_who_goes_is_known_at_the_next_exchange() {
    let run = run();
    let plan = LocalPlan::local_adam(4);
    let first = has(&run, &LocalOptimizer::new(build(&run), alone_workers(), plan).unwrap());
    for goes in [Goes::Leaves, Goes::IsLost, Goes::IsLostWithin] {
        let (ends, came) = come_and_go(goes);
        assert!(came >= 8 && came % 4 == 0, "{came}");
        let mut all: BTreeMap<usize, Has> = (0..3).map(|id| (id, first.clone())).collect();
        let failed = (goes == Goes::IsLostWithin).then_some(8);
        for t in 1..=came + 8 {
            all.iter_mut().for_each(|(id, has)| update(&run, has, *id, t));
            if t == if failed.is_some() { 7 } else { 5 } {
                assert!(ends[&2].0 == all.remove(&2).unwrap(), "{goes:?}");
            }
            if t % 4 == 0 && Some(t) != failed {
                let mean = mean(&all.values().collect::<Vec<_>>());
                all.values_mut().for_each(|has| *has = mean.clone());
                // Its first successful exchange takes over the mean and adds nothing.
                if t >= came && !all.contains_key(&3) {
                    all.insert(3, mean);
                }
            }
        }
        for id in [0, 1, 3] {
            assert!(ends[&id].0 == all[&id], "worker {id}, who {goes:?}, came at {came}");
        }
    }
}

pub fn alone_workers() -> Workers {
    let world = alone();
    Workers { across: Arc::clone(&world), world }
}

#[test]
fn one_worker_trains_on_alone_and_another_plan_is_refused() {
    let (run, plan) = (run(), LocalPlan::des_loc(2, 4, 4));
    let digest = plan.digest(&build(&run));
    let others = [
        LocalPlan::des_loc(2, 4, 8).digest(&build(&run)),
        plan.digest(&build(&Run { rule: WhichRule::AmsGrad, ..run.clone() })),
    ];
    assert!(others[0].plan != digest.plan && others[0].rule == digest.rule);
    assert!(others[1].plan == digest.plan && others[1].rule != digest.rule);
    let members = InProcess::new(Config::new(digest, 1), Clock::real()).unwrap();
    let member = Arc::new(members.join(0, digest, LONG).unwrap());
    let followed = Arc::clone(&member) as Arc<dyn Membership>;
    let connect = |round: &Round| workers(&member, round);
    let mut local = LocalOptimizer::join(build(&run), plan.clone(), followed, connect).unwrap();
    let told: Vec<_> = (0..8).map(|_| step(&run, &mut local, &member, 0)).collect();
    assert_eq!(told, [(0, 0), (1, 1), (0, 0), (1, 3), (0, 0), (1, 1), (0, 0), (1, 3)]);
    let mut expected = has(&run, &LocalOptimizer::new(build(&run), alone_workers(), plan.clone()).unwrap());
    (1..=8).for_each(|t| update(&run, &mut expected, 0, t));
    assert!(has(&run, &local) == expected);
    for other in others {
        let refused = members.join(1, other, LONG).unwrap_err();
        assert!(
            matches!(refused, Error::Refused(Refusal::OtherPlan { .. } | Refusal::OtherRule { .. })),
            "{refused}"
        );
    }
}

#[test]
fn what_cannot_be_followed_is_refused() {
    use meshstep_local::{Fragment, Placement, Timing, What};
    let run = run();
    let digest = Digest { plan: 1, rule: 1 };
    let members = InProcess::new(Config::new(digest, 1), Clock::real()).unwrap();
    let member: Arc<dyn Membership> = Arc::new(members.join(0, digest, LONG).unwrap());
    let nobody = |_: &Round| -> Result<Workers, Error> { panic!("refused before") };
    let before = |period| {
        Fragment::mean(What::Params, Timing { placement: Placement::Before, ..Timing::every(period) })
    };
    let moments = |period| LocalPlan::local_adam(period).fragments.remove(1);
    let both = LocalPlan::new(vec![moments(3), before(2)]);
    let refused = LocalOptimizer::join(build(&run), both, Arc::clone(&member), nobody).unwrap_err();
    assert!(matches!(refused, LocalError::BothSides { before: 1, after: 0 }), "{refused}");
    // Only the first of a worker's ranks may have the membership.
    for (speaks, wrong) in [([false, false], 0), ([true, true], 1), ([false, true], 0)] {
        let told = loopback::spawn(2, |comm| {
            let (rank, inner, plan) = (comm.rank(), run.build(comm).unwrap(), LocalPlan::local_sgd(2));
            match speaks[rank] {
                true => LocalOptimizer::join(inner, plan, Arc::clone(&member), nobody).unwrap_err(),
                false => LocalOptimizer::join_through_rank0(inner, plan, nobody).unwrap_err(),
            }
        });
        for told in told.unwrap() {
            assert!(matches!(told, LocalError::Speaks { rank } if rank == wrong), "{told}");
        }
    }
    // Ranks of one worker with two plans.
    let told = loopback::spawn(2, |comm| {
        let (rank, inner) = (comm.rank(), run.build(comm).unwrap());
        match rank {
            0 => LocalOptimizer::join(inner, LocalPlan::local_sgd(2), Arc::clone(&member), nobody),
            _ => LocalOptimizer::join_through_rank0(inner, LocalPlan::local_sgd(3), nobody),
        }
        .unwrap_err()
        .to_string()
    });
    let apart = "ranks disagree on period of fragment 0: rank 0 has 2, rank 1 has 3";
    assert_eq!(told.unwrap(), [apart; 2]);
}

/// A membership that vetoes one exchange, whatever the worker votes.
#[derive(Debug)]
pub struct Vetoing {
    pub member: Arc<InProcessWorker>,
    pub step: u64,
}

impl Membership for Vetoing {
    fn boundary(&self, step: u64) -> Result<Round, Error> {
        self.member.boundary(step)
    }

    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, Error> {
        let vetoes = round.step == self.step;
        self.member.vote(round, if vetoes { Ballot::Veto } else { ballot })
    }

    fn decided(&self, round: &Round) -> Option<Decision> {
        self.member.decided(round)
    }

    fn leave(&self) -> Result<(), Error> {
        self.member.leave()
    }
}

#[test]
fn what_one_member_vetoes_nobody_applies() {
    let (run, plan) = (run(), LocalPlan::local_adam(4));
    let digest = plan.digest(&build(&run));
    let members = InProcess::new(Config::new(digest, 2), Clock::real()).unwrap();
    let worker = |id: usize| {
        let member = Arc::new(members.join(id as u64, digest, LONG).unwrap());
        let connect = |round: &Round| workers(&member, round);
        let step_vetoed = if id == 1 { 4 } else { u64::MAX };
        let followed: Arc<dyn Membership> =
            Arc::new(Vetoing { member: Arc::clone(&member), step: step_vetoed });
        let mut local = LocalOptimizer::join(build(&run), plan.clone(), followed, connect).unwrap();
        let told: Vec<usize> = (0..8).map(|_| step(&run, &mut local, &member, id).1).collect();
        assert_eq!(told, [0, 0, 0, 0, 0, 0, 0, plan.fragments.len()]);
        has(&run, &local)
    };
    let ends: Vec<Has> = thread::scope(|scope| {
        let worker = &worker;
        let threads = [0, 1].map(|id| scope.spawn(move || worker(id)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let first = has(&run, &LocalOptimizer::new(build(&run), alone_workers(), plan.clone()).unwrap());
    let mut all = [first.clone(), first];
    for t in 1..=8 {
        all.iter_mut().enumerate().for_each(|(id, has)| update(&run, has, id, t));
    }
    let mean = mean(&[&all[0], &all[1]]);
    assert!(ends.iter().all(|end| *end == mean));
}
