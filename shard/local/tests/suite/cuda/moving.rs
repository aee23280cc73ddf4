//! Workers on GPUs that are saved, loaded and regrouped: they continue with the bits of loopback.

use crate::common::gpus::{alone, on, room_for};
use crate::common::{self, Gradients, Run};
use crate::cuda::exchanges::{begin, step};
use crate::disk::MemoryDisk;
use meshstep_checkpoint::{self as checkpoint, Load, Save, Store};
use meshstep_local::{LocalOptimizer, LocalPlan, OnFailure, Workers};
use meshstep_shard::{Optimizer, Stage, Step};
use std::sync::Arc;

/// Parameters and state of a rank.
type Has = (Vec<Vec<u8>>, Vec<(u64, Vec<Vec<u8>>)>);

fn has(optimizer: &Optimizer) -> Has {
    (common::params(optimizer), common::state(optimizer))
}

fn run(ranks: usize) -> Run {
    Run { ranks, gradients: Gradients::Rough, max_norm: Some(20.0), ..Run::default() }.stage(Stage::Zero1)
}

/// Saves after five steps, and takes four more.
fn saved(gpus: bool, run: &Run, plan: &LocalPlan, store: &Store) -> Vec<Has> {
    on(gpus, run, |world, run| {
        let at = (world.rank(), world.rank() / 2);
        let mut local = begin(run, plan, run.ranks / 2, world);
        (0..5).for_each(|_| drop(step(run, &mut local, at)));
        checkpoint::save(&mut local, store, Save::default()).unwrap();
        (5..9).for_each(|_| drop(step(run, &mut local, at)));
        has(local.optimizer())
    })
}

/// Loads after a step of its own, and takes four more; `inside` ranks form a worker.
fn loaded(gpus: bool, run: &Run, inside: usize, plan: &LocalPlan, store: &Store) -> Vec<Has> {
    on(gpus, run, |world, run| {
        let at = (world.rank(), world.rank() / inside);
        let mut local = begin(run, plan, run.ranks / inside, world);
        drop(step(run, &mut local, at));
        checkpoint::load(&mut local, store, Load::default()).unwrap();
        (5..9).for_each(|_| drop(step(run, &mut local, at)));
        has(local.optimizer())
    })
}

#[test]
fn workers_are_saved_and_loaded_between_gpus_and_the_cpu() {
    let _alone = alone();
    if !room_for(4) {
        return;
    }
    let plans = [
        LocalPlan::streaming_diloco(4, 2, 2, 0.5),
        LocalPlan::des_loc(2, 4, 4).with(|f| f.timing.delay = 1),
        LocalPlan::diloco(4),
    ];
    for plan in &plans {
        let on_gpus = Store::on(Arc::new(MemoryDisk::new("/run")), "/run");
        let on_cpu = Store::on(Arc::new(MemoryDisk::new("/run")), "/run");
        let expected = saved(false, &run(4), plan, &on_cpu);
        assert!(saved(true, &run(4), plan, &on_gpus) == expected, "saving shows: {plan:?}");
        for (gpus, store) in [(true, &on_cpu), (true, &on_gpus), (false, &on_gpus)] {
            assert!(loaded(gpus, &run(4), 2, plan, store) == expected, "onto GPUs {gpus}: {plan:?}");
        }
        // A different number of workers continues from the mean.
        let [gpu, cpu] = [true, false].map(|gpus| loaded(gpus, &run(4), 1, plan, &on_cpu));
        assert!(gpu == cpu, "four of two: {plan:?}");
    }
}

/// A worker of one rank trains, another joins, and both continue.
fn regrouped(gpus: bool, plan: &LocalPlan) -> Vec<(Has, Has)> {
    on(gpus, &run(2), |world, run| {
        let rank = world.rank();
        let own = world.split(Some(rank as u32), 0).unwrap().unwrap();
        let (comm, workers) = Workers::split(own, 0).unwrap();
        let mut local = LocalOptimizer::new(run.build(comm).unwrap(), workers, plan.clone()).unwrap();
        (0..if rank == 0 { 5 } else { 2 }).for_each(|_| drop(step(run, &mut local, (rank, rank))));
        if rank == 1 {
            local.enter();
        }
        let all = world.split(Some(0), 0).unwrap().unwrap();
        let across = all.split(Some(0), 0).unwrap().unwrap();
        local.regroup(Workers { world: all, across }).unwrap();
        let entered = has(local.optimizer());
        assert_eq!(local.steps(), 5);
        (5..12).for_each(|_| drop(step(run, &mut local, (rank, rank))));
        (entered, has(local.optimizer()))
    })
}

#[test]
fn a_worker_that_comes_gets_everything_of_a_gpu() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let delayed = LocalPlan::streaming_diloco(4, 2, 2, 0.5).with(|f| f.on_failure = OnFailure::RollBack);
    for plan in [LocalPlan::des_loc(2, 4, 4), LocalPlan::diloco(4), delayed] {
        let [gpus, cpu] = [true, false].map(|gpus| regrouped(gpus, &plan));
        assert!(gpus[0].0 == gpus[1].0, "entered with other values: {plan:?}");
        assert!(gpus == cpu, "{plan:?}");
    }
}
