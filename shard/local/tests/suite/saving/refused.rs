//! Loads and saves that fail.

use super::{
    SAVED, STEPS, load_and_train, named, of_step, run, spawn, step, steps_until, store, train_and_save,
};
use crate::common::{Run, draws};
use crate::disk::MemoryDisk;
use crate::equal::{assert_equal, end};
use crate::naive::Naive;
use meshstep_checkpoint::pytorch::{Import, PyTorchFile};
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Load, Mismatch, Store};
use meshstep_local::LocalPlan;
use meshstep_shard::{Stage, Step};
use std::path::Path;
use std::sync::Arc;

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
fn what_somebody_has_edited_is_refused_and_changes_nothing() {
    use serde_json::{Value, json};
    let disk = MemoryDisk::new("/run");
    let (store, run) = (Store::on(Arc::new(disk.clone()), "/run"), run(Stage::Zero2));
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
        disk.damage(path, |bytes| *bytes = manifest.to_text().into_bytes());
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
        disk.damage(path, |bytes| *bytes = manifest.to_text().into_bytes());
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
        let disk = MemoryDisk::new("/run");
        let store = Store::on(Arc::new(disk.clone()), "/run");
        disk.fail_at(fails_at);
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
fn calls_that_workers_do_not_support_are_refused_on_every_rank() {
    let (run, file) =
        (run(Stage::Zero2), PyTorchFile::on(Arc::new(MemoryDisk::new("/run")), Path::new("/run/file")));
    let ranks = spawn(&run, &LocalPlan::local_adam(2), [2, 2], |mut local, _| {
        let via = Arc::clone(local.optimizer().comm());
        let results: [Result<(), checkpoint::Error>; 5] = [
            checkpoint::serialize(&mut local).map(drop),
            checkpoint::deserialize(&mut local, &[]),
            checkpoint::export_pytorch(&mut local, &file, 0),
            checkpoint::import_pytorch(&mut local, &file, Import::default()).map(drop),
            checkpoint::reshard(&via, Some(&mut local), None).map(drop),
        ];
        results.map(|result| match refused(result.unwrap_err()) {
            CheckpointError::Unsupported { call, .. } => call,
            other => panic!("{other}"),
        })
    });
    for calls in ranks {
        assert_eq!(calls, ["serialize", "deserialize", "export_pytorch", "import_pytorch", "reshard"]);
    }
}
