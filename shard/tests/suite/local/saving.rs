//! Checkpoints of workers: the same workers resume without a difference, and other numbers of workers resume from their mean.

use crate::checkpoint::sim::Sim;
use crate::common::{self, Gradients, Run, STAGES, WhichRule, cases, draws, long, tried, turns};
use crate::local::equal::{End, assert_equal, end, plans};
use crate::local::naive::{Naive, tokens};
use meshstep_cases::{Effort, effort};
use meshstep_comm::loopback;
use meshstep_shard::checkpoint::{self, CheckpointError, Load, Mismatch, Save, Saver, Store};
use meshstep_shard::local::{
    Fragment, LocalOptimizer, LocalPlan, OnFailure, Placement, Select, Timing, Weights, What, Workers,
};
use meshstep_shard::{Optimizer, Options, Stage};
use meshstep_tensor::{Category, DType, bf16};
use std::sync::Arc;

const STEPS: u64 = 11;

/// Steps of the checkpoints: in the middle of intervals, and while exchanges are in flight.
const SAVED: [u64; 3] = [4, 5, 7];

fn store() -> Store {
    Store::on(Arc::new(Sim::new("/run")), "/run")
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
fn other_workers_go_on_from_the_mean() {
    for (p, (name, rule, plan)) in plans().into_iter().chain(by_tokens()).enumerate() {
        if !in_turn(p, 0) {
            continue;
        }
        let store = store();
        let run = |i: usize| Run { rule, ..run(STAGES[(first_stage(p) + i) % 4]) };
        let loaded: Vec<usize> = turns(&[0, 1, 2], p + p / 3, 1).collect();
        let saved: Vec<u64> = loaded.iter().map(|&k| SAVED[k]).collect();
        let saved = if long() { SAVED.to_vec() } else { saved };
        train_and_save(&run(0), &plan, 1 + p % 2, &store, &saved);
        for k in loaded {
            let at = SAVED[k];
            // Six workers take much longer than two.
            for workers in turns(&[2, 6], usize::from(p % 6 == 1), 1) {
                let saved_run = Run { ranks: 4, ..run(0) };
                let mut saved = Naive::new(&saved_run, &plan, 4);
                (0..at).for_each(|step| saved.step(step));
                let naive_run = Run { ranks: workers, ..run(0) };
                let mut naive = saved.merged(&naive_run, workers);
                (at..STEPS).for_each(|step| naive.step(step));
                let ends = load_and_train(&run(k + 1), &plan, [workers, 2], &store, of_step(at));
                for (rank, end) in ends.iter().enumerate() {
                    let what = format!("{name} from {at} to {workers}, rank {rank}");
                    assert_equal(end, &naive.workers[rank / 2], &what);
                }
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

fn refused(error: checkpoint::Error) -> CheckpointError {
    match error {
        checkpoint::Error::Failed(failed) => failed.error,
        other => panic!("{other}"),
    }
}

#[test]
fn another_plan_is_refused_or_begins_from_the_mean() {
    let (store, run) = (store(), run(Stage::Zero2));
    let saved_by = LocalPlan::streaming_diloco(4, 3, 2, 0.5);
    train_and_save(&run, &saved_by, 2, &store, &SAVED);
    for (other, workers) in [(LocalPlan::diloco(3), 4), (LocalPlan::des_loc(2, 3, 4), 3)] {
        let told = spawn(&run, &other, [workers, 2], |mut local, worker| {
            steps_until(&run, &mut local, worker, 2);
            let before = end(&run, &local);
            let told = refused(checkpoint::load(&mut local, &store, of_step(5)).unwrap_err());
            assert_eq!((local.steps(), end(&run, &local).params), (2, before.params));
            told
        });
        for told in told {
            let CheckpointError::Mismatch(Mismatch::Setting { what, saved, here }) = told else {
                panic!("{told}")
            };
            assert_eq!(what, "the local plan");
            assert_ne!(saved, here);
        }
        let saved_run = Run { ranks: 4, ..run.clone() };
        let mut naive = Naive::new(&saved_run, &saved_by, 4);
        (0..5).for_each(|step| naive.step(step));
        let naive_run = Run { ranks: workers, ..run.clone() };
        let mut naive = naive.anew(&naive_run, &other, workers);
        (5..STEPS).for_each(|step| naive.step(step));
        let load = Load { other_settings: true, ..of_step(5) };
        for (rank, end) in load_and_train(&run, &other, [workers, 2], &store, load).iter().enumerate() {
            assert_equal(end, &naive.workers[rank / 2], &format!("{workers} workers, rank {rank}"));
        }
    }
}

#[test]
fn workers_begin_from_what_one_optimizer_has_saved() {
    let (store, run) = (store(), run(Stage::Zero1));
    let plan = LocalPlan::diloco(3);
    let alone = loopback::spawn(2, |comm| {
        let mut opt: Optimizer = run.build(comm).unwrap();
        for t in 1..=4 {
            let mb = opt.micro_batch(1).unwrap();
            for i in 0..run.lens.len() {
                let grad: Vec<f32> = run.gradient(t, 0, 0, i).iter().map(|&g| g as f32).collect();
                mb.grad(&common::name(i), &grad[..]).unwrap();
            }
            mb.finish().unwrap();
            let _ = opt.step(run.at(t)).unwrap().outcome().unwrap();
        }
        checkpoint::save(&mut opt, &store, named(4)).unwrap();
    });
    alone.unwrap();
    let one = Run { ranks: 1, ..run.clone() };
    let mut naive = Naive::new(&one, &LocalPlan::local_sgd(100), 1);
    (0..4).for_each(|step| naive.step(step));
    let three = Run { ranks: 3, ..run.clone() };
    let mut naive = naive.anew(&three, &plan, 3);
    (4..STEPS).for_each(|step| naive.step(step));
    for (rank, end) in load_and_train(&run, &plan, [3, 2], &store, of_step(4)).iter().enumerate() {
        assert_equal(end, &naive.workers[rank / 2], &format!("rank {rank}"));
    }
}

#[test]
fn who_has_only_just_come_does_not_count_in_the_mean() {
    let (store, run) = (store(), Run { rule: WhichRule::AdamW, ..run(Stage::Zero1) });
    let plan = LocalPlan::des_loc(4, 4, 4);
    let saved = spawn(&run, &plan, [3, 2], |mut local, worker| {
        steps_until(&run, &mut local, worker, 2);
        if worker == 0 {
            local.enter();
        }
        checkpoint::save(&mut local, &store, named(2)).unwrap();
        step(&run, &mut local, worker);
        step(&run, &mut local, worker);
        end(&run, &local)
    });
    // The same number of workers: the new one still does not count.
    let again = spawn(&run, &plan, [3, 2], |mut local, worker| {
        checkpoint::load(&mut local, &store, of_step(2)).unwrap();
        steps_until(&run, &mut local, worker, 4);
        end(&run, &local)
    });
    for (end, saved) in again.iter().zip(&saved) {
        assert_eq!(end.params, saved.params);
    }
    let two = Run { ranks: 3, ..run.clone() };
    let mut naive = Naive::new(&two, &plan, 3);
    (0..2).for_each(|step| naive.step(step));
    naive.workers.remove(0);
    let four = Run { ranks: 4, ..run.clone() };
    let merged = naive.merged(&four, 4);
    let ends = spawn(&run, &plan, [4, 1], |mut local, _| {
        checkpoint::load(&mut local, &store, of_step(2)).unwrap();
        end(&run, &local)
    });
    for (rank, end) in ends.iter().enumerate() {
        assert_equal(end, &merged.workers[rank], &format!("rank {rank}"));
    }
}

#[test]
fn what_somebody_has_edited_is_refused_and_changes_nothing() {
    use serde_json::{Value, json};
    let sim = Sim::new("/run");
    let (store, run) = (Store::on(Arc::new(sim.clone()), "/run"), run(Stage::Zero2));
    let plan = LocalPlan::streaming_diloco(4, 3, 2, 0.5);
    train_and_save(&run, &plan, 1, &store, &SAVED);
    let path = std::path::Path::new("/run/step-000000000005/manifest.json");
    let whole = store.open(5).unwrap().manifest().clone();
    let local = whole.settings["local"].clone();
    assert_eq!(local["flights"].as_array().unwrap().len(), 2, "{local:#}");
    let with = |place: &str, value: Value| {
        let mut local = local.clone();
        *local.pointer_mut(place).unwrap() = value;
        local
    };
    let fifth = [local["workers"].as_array().unwrap().clone(), vec![local["workers"][0].clone()]].concat();
    let idle: Vec<Value> = (0..4)
        .map(|w| {
            let mut worker = local["workers"][w].clone();
            worker["active"] = json!(false);
            worker
        })
        .collect();
    let edits = [
        (with("/flights/0/fragments/0", json!(99)), "fragment 99"),
        (with("/flights/0/step", json!(4)), "never arrives"),
        // The delay is 2 steps.
        (with("/flights/0/step", json!(8)), "cannot be in flight at this step"),
        (with("/flights/0/fragments", json!([])), "never arrives"),
        (with("/again", json!([3])), "no fragment 3"),
        (with("/step", json!(1u64 << 60)), "no count of steps"),
        (with("/workers/3/tokens", json!([1])), "does not list every fragment"),
        (with("/workers/3/sent", json!([1])), "does not list every fragment"),
        (with("/workers/3/tokens/0", json!(-1)), "invalid value"),
        (with("/outer_steps", json!([])), "does not list every fragment"),
        (with("/workers", json!(idle)), "no worker's values count"),
        (with("/workers", json!(fifth)), "nothing for \"worker.4/p0\""),
        (with("/workers", json!(vec![&local["workers"][0]; 1000])), "it lists 1000 workers"),
        (with("/hash", json!("0")), "the local plan was saved as 0"),
        (with("/flights", json!([])), "does not list every fragment"),
    ];
    let edits = edits.map(|(edited, expected)| (plan.clone(), of_step(5), edited, expected));
    // Counts are used with any plan.
    let most = json!(1u64 << 53);
    let counts = ["/step", "/outer_steps/2", "/workers/3/steps"].map(|place| {
        let load = Load { other_settings: true, ..of_step(5) };
        (LocalPlan::diloco(3), load, with(place, most.clone()), "no count of steps")
    });
    let mut drawn = draws(1);
    for (plan, load, edited, expected) in edits.into_iter().chain(counts).filter(|_| drawn()) {
        let mut manifest = whole.clone();
        manifest.settings.insert("local".to_owned(), edited);
        sim.damage(path, |bytes| *bytes = manifest.to_text().into_bytes());
        let told = spawn(&run, &plan, [4, 1], |mut local, worker| {
            step(&run, &mut local, worker);
            let before = end(&run, &local);
            let told = refused(checkpoint::load(&mut local, &store, load).unwrap_err()).to_string();
            assert_eq!((local.steps(), end(&run, &local).params), (1, before.params));
            // All workers can go on.
            step(&run, &mut local, worker);
            told
        });
        assert!(told.iter().all(|told| told.contains(expected)), "{expected}: {told:?}");
    }
    // Another plan does not use their tokens.
    for (place, ragged) in [("/workers/3/tokens", json!([1])), ("/workers/1/sent", json!([]))] {
        let mut manifest = whole.clone();
        manifest.settings.insert("local".to_owned(), with(place, ragged));
        sim.damage(path, |bytes| *bytes = manifest.to_text().into_bytes());
        spawn(&run, &LocalPlan::diloco(3), [4, 1], |mut local, worker| {
            checkpoint::load(&mut local, &store, Load { other_settings: true, ..of_step(5) }).unwrap();
            step(&run, &mut local, worker);
        });
    }
}

#[test]
fn a_failed_save_is_the_same_error_everywhere_and_steps_go_on() {
    let run = run(Stage::Zero2);
    let plan = LocalPlan::streaming_diloco(4, 3, 2, 0.5);
    let naive_run = Run { ranks: 4, ..run.clone() };
    let mut naive = Naive::new(&naive_run, &plan, 4);
    (0..STEPS).for_each(|step| naive.step(step));
    for fails_at in [0, 3, 9] {
        let sim = Sim::new("/run");
        let store = Store::on(Arc::new(sim.clone()), "/run");
        sim.fail_at(fails_at);
        let ends = spawn(&run, &plan, [4, 2], |mut local, worker| {
            steps_until(&run, &mut local, worker, 5);
            let told = refused(checkpoint::save(&mut local, &store, named(5)).unwrap_err());
            let busy = (worker == 1).then(|| local.micro_batch(1).map(drop));
            // One worker is in the middle of a step: the save fails on all workers.
            let refused = checkpoint::save(&mut local, &store, named(6)).unwrap_err();
            assert!(matches!(refused, checkpoint::Error::Shard(_)), "{refused}");
            drop(busy);
            told
        });
        assert!(ends.iter().all(|told| *told == ends[0]), "{ends:?}");
        let ends = spawn(&run, &plan, [4, 2], |mut local, worker| {
            steps_until(&run, &mut local, worker, 5);
            checkpoint::save(&mut local, &store, named(5)).unwrap_err();
            steps_until(&run, &mut local, worker, STEPS);
            end(&run, &local)
        });
        for (rank, end) in ends.iter().enumerate() {
            assert_equal(end, &naive.workers[rank / 2], &format!("rank {rank}"));
        }
    }
}

#[test]
fn parameters_that_follow_masters_follow_their_mean() {
    let (store, plan) = (store(), LocalPlan::local_adam(4));
    let run = |stage| {
        let options = Options { precision: common::F32_MASTER, ..run(stage).options };
        Run { dtype: DType::BF16, options, ..run(stage) }
    };
    let master = |run: &Run, local: &LocalOptimizer, i: usize| -> Vec<f32> {
        let state = local.state(&common::name(i)).unwrap();
        let own: Vec<f32> = state.master.map_or(vec![], |master| master.typed().unwrap().to_vec());
        assert_eq!(own.len(), run.lens[i]);
        own
    };
    let saved = spawn(&run(Stage::Replicated), &plan, [4, 1], |mut local, worker| {
        let run = run(Stage::Replicated);
        steps_until(&run, &mut local, worker, 3);
        checkpoint::save(&mut local, &store, named(3)).unwrap();
        (0..run.lens.len()).map(|i| master(&run, &local, i)).collect::<Vec<_>>()
    });
    spawn(&run(Stage::Zero2), &plan, [3, 2], |mut local, _| {
        checkpoint::load(&mut local, &store, of_step(3)).unwrap();
        for (i, &len) in run(Stage::Zero2).lens.iter().enumerate() {
            let mean = |j: usize| saved.iter().map(|own| f64::from(own[i][j])).sum::<f64>() / 4.0;
            let masters: Vec<f32> = (0..len).map(|j| mean(j) as f32).collect();
            let rounded: Vec<bf16> = masters.iter().map(|&x| bf16::from_f32(x)).collect();
            assert_eq!(local.param(&common::name(i)).unwrap().typed::<bf16>().unwrap(), rounded);
            let state = local.state(&common::name(i)).unwrap();
            let own = state.master.map_or(vec![], |master| master.typed::<f32>().unwrap().to_vec());
            assert_eq!(own, masters[state.range.clone()]);
        }
    });
}

/// A value sent after more updates than the parameter has here arrives nevertheless.
#[test]
fn a_worker_that_is_loaded_in_part_goes_on_to_what_is_on_its_way() {
    let (sim, run) = (Sim::new("/run"), run(Stage::Zero2));
    let store = Store::on(Arc::new(sim.clone()), "/run");
    let [(_, rule, plan), ..] = by_tokens();
    let run = Run { rule, ..run };
    train_and_save(&run, &plan, 1, &store, &SAVED);
    let mut manifest = store.open(5).unwrap().manifest().clone();
    manifest.tensors.get_mut("worker.0/p0").unwrap().slots.remove("m").unwrap();
    let path = std::path::Path::new("/run/step-000000000005/manifest.json");
    sim.damage(path, |bytes| *bytes = manifest.to_text().into_bytes());
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

/// Vectors are longer than the part read at once, except in a tenth.
#[test]
fn a_mean_takes_memory_for_parts_of_what_workers_have() {
    // The workers' values together are more than a load may hold.
    let len = cases(1_500_000, 2_000_000) as usize;
    let whole = Run { rule: WhichRule::Sgd, lens: vec![len], ..run(Stage::Zero2) };
    // Weighted by tokens, except for the ends.
    let params = Select::Elements { name: common::name(0), range: 5..len - 7 };
    let own = Fragment::mean(What::Params, Timing::every(100));
    let plan = LocalPlan::new(vec![Fragment { params, weights: Weights::Tokens, ..own }]);
    let (store, workers) = (store(), 6);
    spawn(&whole, &plan, [workers, 1], |mut local, worker| {
        step(&whole, &mut local, worker);
        checkpoint::save(&mut local, &store, named(1)).unwrap();
    });
    let (saved_by, one) = (Run { ranks: workers, ..whole.clone() }, Run { ranks: 1, ..whole.clone() });
    let mut naive = Naive::new(&saved_by, &plan, workers);
    naive.step(0);
    let naive = naive.merged(&one, 1);
    let ends = spawn(&whole, &plan, [1, 1], |mut local, _| {
        let meter = local.optimizer().options().meter.clone();
        meter.reset_peaks();
        checkpoint::load(&mut local, &store, of_step(1)).unwrap();
        (end(&whole, &local), meter.peak(Category::Staging))
    });
    assert_equal(&ends[0].0, &naive.workers[0], "the only worker");
    // Parts of 16 MiB, as much memory for the readers, and a few words.
    let (all, most) = (4 * len as u64, (32 << 20) + (64 << 10));
    assert!(ends[0].1 > all && ends[0].1 <= all + most, "{} bytes, {all} of them read", ends[0].1);
}
