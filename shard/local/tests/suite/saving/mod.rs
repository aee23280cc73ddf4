//! Checkpoints of workers: the same workers resume without a difference, and other numbers of workers resume from their mean.

mod means;
mod refused;

use crate::common::{self, Gradients, Run, STAGES, WhichRule, long, tried, turns};
use crate::disk::MemoryDisk;
use crate::equal::{End, assert_equal, end, plans};
use crate::naive::{Naive, tokens};
use meshstep_cases::{Effort, effort};
use meshstep_checkpoint::{self as checkpoint, Load, Save, Saver, Store};
use meshstep_comm::loopback;
use meshstep_local::{LocalOptimizer, LocalPlan, OnFailure, Placement, Weights, Workers};
use meshstep_shard::{Stage, Step};
use std::sync::Arc;

const STEPS: u64 = 11;

/// Steps of the checkpoints: in the middle of intervals, and while exchanges are in flight.
const SAVED: [u64; 3] = [4, 5, 7];

fn store() -> Store {
    Store::on(Arc::new(MemoryDisk::new("/run")), "/run")
}

fn run(stage: Stage) -> Run {
    Run { gradients: Gradients::Rough, max_norm: Some(5.0), ..Run::default() }.stage(stage)
}

/// Runs `then` on each rank of `workers` workers with `inside` ranks each.
fn spawn<T: Send>(
    run: &Run,
    plan: &LocalPlan,
    [workers, inside]: [usize; 2],
    then: impl Fn(LocalOptimizer, usize) -> T + Sync,
) -> Vec<T> {
    let ends = loopback::spawn(workers * inside, |world| {
        let worker = world.rank() / inside;
        let (comm, between) = Workers::split(world, worker as u32).unwrap();
        let inner = run.build(comm).unwrap();
        then(LocalOptimizer::new(inner, between, plan.clone()).unwrap(), worker)
    });
    ends.unwrap()
}

/// Takes the next step. All ranks of a worker have the same gradient, so that the number of ranks does not matter.
fn step(run: &Run, local: &mut LocalOptimizer, worker: usize) {
    let step = local.steps();
    // The number of tokens does not depend on the number of ranks.
    let weight = 6 * tokens(worker, step) / local.optimizer().comm().world_size() as u64;
    let mb = local.micro_batch(weight).unwrap();
    for i in 0..run.lens.len() {
        let grad: Vec<f32> = run.gradient(step + 1, 0, worker, i).iter().map(|&g| g as f32).collect();
        mb.grad(&common::name(i), &grad[..]).unwrap();
    }
    mb.finish().unwrap();
    assert_eq!(local.step(run.at(step + 1)).unwrap().exchanged.failed, []);
}

/// Takes a step with something to send again; returns the merged fragments.
fn merged_in_step(
    run: &Run,
    local: &mut LocalOptimizer,
    worker: usize,
    hands_over: bool,
) -> Option<Vec<usize>> {
    let step = local.steps();
    let mb = local.micro_batch(1).unwrap();
    for i in (0..run.lens.len()).filter(|_| hands_over) {
        let grad: Vec<f32> = run.gradient(step + 1, 0, worker, i).iter().map(|&g| g as f32).collect();
        mb.grad(&common::name(i), &grad[..]).unwrap();
    }
    mb.finish().unwrap();
    local.step(run.at(step + 1)).ok().map(|told| told.exchanged.merged)
}

fn steps_until(run: &Run, local: &mut LocalOptimizer, worker: usize, until: u64) {
    (local.steps()..until).for_each(|_| step(run, local, worker));
}

fn named<'a>(step: u64) -> Save<'a> {
    Save { step: Some(step), ..Save::default() }
}

fn of_step(step: u64) -> Load {
    Load { step: Some(step), ..Load::default() }
}

/// Trains four workers, and saves at the given steps.
fn train_and_save(run: &Run, plan: &LocalPlan, inside: usize, store: &Store, saved: &[u64]) -> Vec<End> {
    spawn(run, plan, [4, inside], |mut local, worker| {
        let mut saver = Saver::default();
        for &at in saved {
            steps_until(run, &mut local, worker, at);
            if at % 2 == 0 {
                let save = Save { after: Some(&mut saver), ..named(at) };
                checkpoint::save(&mut local, store, save).unwrap();
            } else {
                let saving = checkpoint::save_async(&mut local, &mut saver, store, named(at)).unwrap();
                // Another save waits for this one, and so does the drop of the saver.
                drop(saving);
            }
        }
        steps_until(run, &mut local, worker, STEPS);
        end(run, &local)
    })
}

/// Resumes from a checkpoint, after other steps.
fn load_and_train(run: &Run, plan: &LocalPlan, mesh: [usize; 2], store: &Store, load: Load) -> Vec<End> {
    spawn(run, plan, mesh, |mut local, worker| {
        // State that the load must discard: other values, and exchanges in flight.
        steps_until(run, &mut local, worker + 1, 3);
        let loaded = checkpoint::load(&mut local, store, load).unwrap();
        assert_eq!((loaded.missing, loaded.unexpected), (vec![], vec![]));
        assert_eq!(local.steps(), load.step.unwrap());
        steps_until(run, &mut local, worker, STEPS);
        end(run, &local)
    })
}

/// Plans that weight by tokens while an exchange is in flight, or before the tokens of a step are counted.
fn by_tokens() -> [(&'static str, WhichRule, LocalPlan); 4] {
    let late = LocalPlan::local_sgd(4).with(|f| (f.timing.delay, f.weights) = (3, Weights::Tokens));
    let often = LocalPlan::des_loc(3, 4, 4).with(|f| (f.timing.delay, f.weights) = (2, Weights::Tokens));
    // Before the first step no tokens have been counted.
    let before = |plan: LocalPlan| {
        let plan = plan.placed(Placement::Before);
        plan.with(|f| (f.timing.during.start, f.weights) = (1, Weights::Tokens))
    };
    let at_once = before(LocalPlan::des_loc(2, 5, 7));
    let outer = before(LocalPlan::diloco(4));
    [
        ("delayed by tokens", WhichRule::AdamW, late),
        ("moments delayed by tokens", WhichRule::AdamW, often),
        ("by tokens before", WhichRule::AdamW, at_once),
        ("outer by tokens before", WhichRule::AdamW, outer),
    ]
}

/// Returns true if test `test`, 0 or 1 of the two that resume from checkpoints, uses plan `p`. In a normal run each plan is in one of them.
fn in_turn(p: usize, test: usize) -> bool {
    match effort() {
        Effort::Long => true,
        Effort::Normal => p.div_ceil(2) % 2 == test,
        Effort::Tenth => tried(p, 1),
    }
}

/// Returns the first stage that plan `p` uses.
fn first_stage(p: usize) -> usize {
    // A test uses two plans of four, which would otherwise cover only two stages of four.
    if long() { p } else { p + p / 4 }
}

#[test]
fn as_many_workers_go_on_as_if_nothing_had_been() {
    for (p, (name, rule, plan)) in plans().into_iter().chain(by_tokens()).enumerate() {
        if !in_turn(p, 1) {
            continue;
        }
        let store = store();
        let run = |i: usize| Run { rule, ..run(STAGES[(first_stage(p) + i) % 4]) };
        let mut naive_run = run(0);
        naive_run.ranks = 4;
        let mut naive = Naive::new(&naive_run, &plan, 4);
        (0..STEPS).for_each(|step| naive.step(step));
        // Workers of three ranks take much longer than others.
        let ranks = |i: usize| if long() || i % 6 == 2 { [1, 2, 3][i % 3] } else { [1, 2, 1][i % 3] };
        let inside = ranks(p);
        let loaded: Vec<usize> = turns(&[0, 1, 2], p + p / 3, 1).collect();
        // Several saves in turn are for workers of one rank, unless the run is long.
        let saved: Vec<u64> = loaded.iter().map(|&k| SAVED[k]).collect();
        let saved = if long() || inside == 1 { SAVED.to_vec() } else { saved };
        let ends = train_and_save(&run(0), &plan, inside, &store, &saved);
        for (rank, end) in ends.iter().enumerate() {
            assert_equal(end, &naive.workers[rank / inside], &format!("{name} rank {rank}"));
        }
        for k in loaded {
            let at = SAVED[k];
            store.open(at).unwrap().verify().unwrap();
            let inside = ranks(p + k);
            let ends = load_and_train(&run(k + 1), &plan, [4, inside], &store, of_step(at));
            for (rank, end) in ends.iter().enumerate() {
                assert_equal(end, &naive.workers[rank / inside], &format!("{name} from {at}, rank {rank}"));
            }
        }
    }
}

#[test]
fn what_is_to_be_sent_again_is_so_after_a_checkpoint() {
    let (store, run) = (store(), run(Stage::Zero2));
    let plan = LocalPlan::local_adam(4).with(|f| f.on_failure = OnFailure::Retry);
    let all = Some(vec![0, 1, 2]);
    let go_on = |local: &mut LocalOptimizer, worker: usize| {
        assert_eq!(merged_in_step(&run, local, worker, true), all);
        assert_eq!(merged_in_step(&run, local, worker, true), Some(vec![]));
        steps_until(&run, local, worker, STEPS);
        end(&run, local)
    };
    let saved = spawn(&run, &plan, [4, 2], |mut local, worker| {
        steps_until(&run, &mut local, worker, 3);
        // One worker cannot take its step, so nothing is exchanged; then save before the retry.
        let told = merged_in_step(&run, &mut local, worker, worker != 1);
        assert_eq!(told, (worker != 1).then(Vec::new));
        checkpoint::save(&mut local, &store, named(4)).unwrap();
        go_on(&mut local, worker)
    });
    for mesh in [[4, 2], [4, 1], [2, 2], [6, 1]] {
        let loaded = spawn(&run, &plan, mesh, |mut local, worker| {
            checkpoint::load(&mut local, &store, of_step(4)).unwrap();
            go_on(&mut local, worker)
        });
        for (rank, end) in loaded.iter().enumerate().filter(|_| mesh[0] == 4) {
            let before = &saved[rank / mesh[1] * 2 + rank % mesh[1]];
            assert!(end.params == before.params, "{mesh:?} rank {rank}");
            assert!(mesh[1] == 1 || format!("{end:?}") == format!("{before:?}"), "rank {rank}");
        }
    }
    // Workers that begin another plan have nothing to send again.
    let other = LocalPlan::local_adam(3).with(|f| f.on_failure = OnFailure::Retry);
    spawn(&run, &other, [4, 2], |mut local, worker| {
        checkpoint::load(&mut local, &store, Load { other_settings: true, ..of_step(4) }).unwrap();
        assert_eq!(merged_in_step(&run, &mut local, worker, true), Some(vec![]));
    });
}

/// A value sent after more updates than the parameter has here arrives nevertheless.
#[test]
fn a_worker_that_is_loaded_in_part_goes_on_to_what_is_on_its_way() {
    let (disk, run) = (MemoryDisk::new("/run"), run(Stage::Zero2));
    let store = Store::on(Arc::new(disk.clone()), "/run");
    let [(_, rule, plan), ..] = by_tokens();
    let run = Run { rule, ..run };
    train_and_save(&run, &plan, 1, &store, &SAVED);
    let mut manifest = store.open(5).unwrap().manifest().clone();
    manifest.tensors.get_mut("worker.0/p0").unwrap().slots.remove("m").unwrap();
    let path = std::path::Path::new("/run/step-000000000005/manifest.json");
    disk.damage(path, |bytes| *bytes = manifest.to_text().into_bytes());
    let ends = spawn(&run, &plan, [4, 1], |mut local, worker| {
        let loaded = checkpoint::load(&mut local, &store, Load { partial: true, ..of_step(5) }).unwrap();
        assert_eq!(loaded.missing, ["worker.0/p0:m"]);
        steps_until(&run, &mut local, worker, STEPS);
        end(&run, &local)
    });
    let naive_run = Run { ranks: 4, ..run.clone() };
    let mut naive = Naive::new(&naive_run, &plan, 4);
    (0..STEPS).for_each(|step| naive.step(step));
    for (end, worker) in ends.iter().zip(&naive.workers) {
        assert_eq!(end.params[1..], worker.params[1..]);
    }
}
