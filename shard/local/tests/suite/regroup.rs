//! Workers that join and leave by regrouping.

use crate::common::{self, Gradients, Run, turns};
use meshstep_comm::{Communicator, loopback};
use meshstep_local::{Fragment, LocalError, LocalOptimizer, LocalPlan, OnFailure, Workers};
use meshstep_shard::{Optimizer, Options, Stage, Step};
use meshstep_tensor::Meter;
use std::sync::Arc;

fn run() -> Run {
    Run { ranks: 6, gradients: Gradients::Rough, max_norm: None, ..Run::default() }
}

fn step(run: &Run, local: &mut LocalOptimizer, rank: usize) -> meshstep_local::LocalStep {
    let t = local.steps() + 1;
    let mb = local.micro_batch(1).unwrap();
    for i in 0..run.lens.len() {
        let grad: Vec<f32> = run.gradient(t, 0, rank, i).iter().map(|&g| g as f32).collect();
        mb.grad(&common::name(i), &grad[..]).unwrap();
    }
    mb.finish().unwrap();
    local.step(run.at(t)).unwrap()
}

/// Returns the parameters and state of this rank as bytes.
fn has(run: &Run, local: &LocalOptimizer) -> Vec<Vec<u8>> {
    let mut all = common::params(local.optimizer());
    for i in 0..run.lens.len() {
        let state = local.state(&common::name(i)).unwrap();
        all.extend(state.slots.iter().map(|(_, slot)| slot.bytes().unwrap().to_vec()));
        all.push(state.t.to_le_bytes().to_vec());
    }
    all
}

/// Makes workers of two ranks among the ranks of one colour; all ranks must call.
fn split(world: &Arc<dyn Communicator>, color: u32) -> Option<(Arc<dyn Communicator>, Workers)> {
    let some = world.split(Some(color), 0).unwrap()?;
    let worker = some.rank() as u32 / 2;
    Some(Workers::split(some, worker).unwrap())
}

fn build(run: &Run, comm: Arc<dyn Communicator>) -> Optimizer {
    run.build(comm).unwrap()
}

#[test]
fn who_is_new_gets_everything_and_equals_the_others_after_the_longest_period() {
    let plans = [LocalPlan::des_loc(4, 12, 24), LocalPlan::diloco(4)];
    let stages = [Stage::Replicated, Stage::Zero1, Stage::Zero2];
    for (s, stage) in stages.into_iter().enumerate() {
        for plan in turns(&[&plans[0], &plans[1]], s, 1) {
            let run = run().stage(stage);
            let ends = loopback::spawn(6, |world| {
                let rank = world.rank();
                // Two workers run for seven steps; a third waits, with values of its own.
                let old = rank < 4;
                let (comm, workers) = split(&world, u32::from(old)).unwrap();
                let mut local = LocalOptimizer::new(build(&run, comm), workers, plan.clone()).unwrap();
                for _ in 0..if old { 7 } else { 2 } {
                    let _ = step(&run, &mut local, rank);
                }
                let before = has(&run, &local);
                if !old {
                    local.enter();
                }
                let worker = rank as u32 / 2;
                let across = world.split(Some(rank as u32 % 2), 0).unwrap().unwrap();
                local.regroup(Workers { world: Arc::clone(&world), across }).unwrap();
                assert_eq!((local.steps(), worker), (7, rank as u32 / 2));
                let entered = has(&run, &local);
                let mut merged = Vec::new();
                for _ in 7..24 {
                    merged.push(step(&run, &mut local, rank).exchanged.merged.len());
                }
                (before, entered, has(&run, &local), merged)
            });
            let ends = ends.unwrap();
            for (rank, (before, entered, after, merged)) in ends.iter().enumerate() {
                // Old workers continue from their values, the new one from those of the first.
                let from = if rank < 4 { before } else { &ends[rank - 4].0 };
                assert_eq!(entered, from, "{stage:?} rank {rank}");
                assert_eq!(merged, &ends[0].3);
                let params = run.lens.len();
                assert_eq!(after[..params], ends[0].2[..params], "{stage:?} rank {rank}");
                if plan.fragments.len() == 3 {
                    assert_eq!(after, &ends[rank % 2].2, "{stage:?} rank {rank}");
                }
            }
        }
    }
}

/// Three workers of one rank continue, and a fourth joins. The first sends it the parameters and two moments once.
#[test]
fn a_join_costs_those_who_stay_neither_memory_nor_traffic() {
    let long = || Run { lens: vec![9_001, 0, 2_000], ..run() };
    let state = (3 * long().lens.iter().sum::<usize>() * size_of::<f32>()) as u64;
    let ends = loopback::spawn(4, |world| {
        let (rank, meter) = (world.rank(), Meter::new());
        let options = Options { meter: meter.clone(), ..run().options };
        let run = Run { ranks: 4, options, ..long() }.stage(Stage::Zero1);
        let alone = world.split(Some(rank as u32), 0).unwrap().unwrap();
        let some = world.split(Some(u32::from(rank < 3)), 0).unwrap().unwrap();
        let workers = Workers { world: Arc::clone(&some), across: some };
        let mut local = LocalOptimizer::new(build(&run, alone), workers, LocalPlan::local_adam(4)).unwrap();
        (0..if rank < 3 { 3 } else { 1 }).for_each(|_| drop(step(&run, &mut local, rank)));
        if rank == 3 {
            local.enter();
        }
        let across = world.split(Some(0), 0).unwrap().unwrap();
        meter.reset_peaks();
        let (before, lived) = (meter.peak_total(), across.stats().total().bytes);
        local.regroup(Workers { world: Arc::clone(&world), across: Arc::clone(&across) }).unwrap();
        (meter.peak_total() - before, across.stats().total().bytes - lived, has(&run, &local))
    });
    let ends = ends.unwrap();
    assert_eq!(ends[3].2, ends[0].2);
    for (rank, (memory, bytes, _)) in ends.iter().enumerate() {
        // Agreeing takes only a few words.
        let (most, gives) = (state / 8, rank == 0);
        assert!(*bytes < most, "rank {rank} of all: {bytes} bytes of {state}");
        assert!(*memory < most || gives && *memory <= state, "rank {rank}: {memory} bytes of {state}");
    }
}

#[test]
fn after_the_first_exchange_of_all_nothing_is_allocated_for_another() {
    let late = |f: &mut Fragment| f.timing.delay = 1;
    for plan in [LocalPlan::des_loc(2, 4, 8), LocalPlan::des_loc(2, 4, 8).with(late), LocalPlan::diloco(2)] {
        let ends = loopback::spawn(2, |world| {
            let (rank, meter) = (world.rank(), Meter::new());
            let options = Options { meter: meter.clone(), ..run().options };
            let run = Run { ranks: 2, options, lens: vec![9_001, 0, 2_000], ..run() };
            let (comm, workers) = Workers::split(world, rank as u32).unwrap();
            let mut local = LocalOptimizer::new(build(&run, comm), workers, plan.clone()).unwrap();
            (0..10).for_each(|_| drop(step(&run, &mut local, rank)));
            meter.reset_peaks();
            let before = meter.peak_total();
            (10..26).for_each(|_| drop(step(&run, &mut local, rank)));
            meter.peak_total() - before
        });
        for more in ends.unwrap() {
            // Only the words of agreements and votes are sent.
            assert!(more < 4_096, "{more} bytes");
        }
    }
}

#[test]
fn three_workers_and_then_two_divide_by_two() {
    let run = Run { rule: common::WhichRule::Sgd, ..run() }.stage(Stage::Zero1);
    let plan = LocalPlan::local_sgd(2);
    let ends = loopback::spawn(6, |world| {
        let rank = world.rank();
        let comm = world.split(Some(rank as u32 / 2), 0).unwrap().unwrap();
        let across = world.split(Some(rank as u32 % 2), 0).unwrap().unwrap();
        let workers = Workers { world: Arc::clone(&world), across };
        let mut local = LocalOptimizer::new(build(&run, comm), workers, plan.clone()).unwrap();
        (0..3).for_each(|_| drop(step(&run, &mut local, rank)));
        // The last worker leaves in the middle of an interval.
        let stays = rank < 4;
        let some = world.split(stays.then_some(0), 0).unwrap()?;
        let across = some.split(Some(rank as u32 % 2), 0).unwrap().unwrap();
        local.regroup(Workers { world: some, across }).unwrap();
        let before = common::floats(local.optimizer(), &common::name(0));
        let told = step(&run, &mut local, rank);
        assert_eq!(told.exchanged.merged, [0]);
        Some((before, common::floats(local.optimizer(), &common::name(0))))
    });
    let ends: Vec<_> = ends.unwrap().into_iter().flatten().collect();
    assert_eq!(ends.len(), 4);
    let lr = run.at(4).lr;
    for j in 0..run.lens[0] {
        let own = |worker: usize| {
            let grad = |rank: usize| run.gradient(4, 0, rank, 0)[j];
            f64::from(ends[2 * worker].0[j]) - lr * (grad(2 * worker) + grad(2 * worker + 1)) / 2.0
        };
        let mean = (own(0) + own(1)) / 2.0;
        assert!((f64::from(ends[0].1[j]) - mean).abs() < 1e-5 * mean.abs().max(1.0), "{j}");
    }
}

#[test]
fn what_is_on_its_way_is_given_up_and_workers_apart_are_refused() {
    let run = run().stage(Stage::Zero1);
    for policy in [OnFailure::KeepLocal, OnFailure::RollBack] {
        let plan = LocalPlan::local_sgd(4).with(|f| (f.timing.delay, f.on_failure) = (3, policy));
        let ends = loopback::spawn(4, |world| {
            let rank = world.rank();
            let (comm, workers) = Workers::split(Arc::clone(&world), rank as u32 / 2).unwrap();
            let first = has_params(&run);
            let mut local = LocalOptimizer::new(build(&run, comm), workers.clone(), plan.clone()).unwrap();
            (0..5).for_each(|_| drop(step(&run, &mut local, rank)));
            let before = common::params(local.optimizer());
            local.regroup(workers).unwrap();
            let after = common::params(local.optimizer());
            assert_eq!(after, if policy == OnFailure::KeepLocal { before } else { first });
            // Nothing arrives in step 6; the flight sent in step 7 arrives in step 10.
            let arrives = |local: &mut LocalOptimizer| !step(&run, local, rank).exchanged.merged.is_empty();
            (5..12).filter(|_| arrives(&mut local)).count()
        });
        assert_eq!(ends.unwrap(), [1; 4]);
    }
    let ends = loopback::spawn(4, |world| {
        let rank = world.rank();
        let (comm, workers) = split(&world, rank as u32 / 2).unwrap();
        let mut local = LocalOptimizer::new(build(&run, comm), workers, LocalPlan::local_sgd(4)).unwrap();
        (0..1 + rank / 2).for_each(|_| drop(step(&run, &mut local, rank)));
        let across = world.split(Some(rank as u32 % 2), 0).unwrap().unwrap();
        let workers = Workers { world: Arc::clone(&world), across };
        let apart = local.regroup(workers.clone()).unwrap_err();
        assert!(matches!(apart, LocalError::Apart { rank: 2, step: 2, first: 1 }), "{apart}");
        local.enter();
        local.regroup(workers).unwrap_err()
    });
    assert!(ends.unwrap().iter().all(|error| matches!(error, LocalError::NobodyHasASay)));
}

/// Returns the initial values as bytes.
fn has_params(run: &Run) -> Vec<Vec<u8>> {
    let bytes = |i: usize| run.initial(i).iter().flat_map(|&x| (x as f32).to_ne_bytes()).collect();
    (0..run.lens.len()).map(bytes).collect()
}
