//! One job, one folder: the holder of its lock, takeovers, and the run that checkpoints belong to.

use crate::common::Run;
use crate::failures::failed;
use crate::layouts::train;
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Error, Holder, Load, RunId, Save, Store};
use meshstep_comm::loopback;
use meshstep_shard::Optimizer;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

fn run() -> Run {
    Run { ranks: 2, ..Run::default() }
}

/// Trains to `steps` and saves, after loading the newest step if `loads`.
fn job(store: &Store, steps: u64, loads: bool) -> Result<(), Error> {
    let ranks = loopback::spawn(2, |comm| {
        let run = run();
        let mut opt = run.build(comm).unwrap();
        let first = match loads {
            true => {
                checkpoint::load(&mut opt, store, Load::default())?;
                opt.steps() + 1
            }
            false => 1,
        };
        train(&run, &mut opt, first..steps + 1);
        checkpoint::save(&mut opt, store, Save::default()).map(drop)
    });
    let ranks = ranks.unwrap();
    let texts: Vec<String> = ranks.iter().map(|rank| format!("{rank:?}")).collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    ranks.into_iter().collect()
}

fn refused(result: Result<(), Error>) -> CheckpointError {
    failed(result.unwrap_err()).error
}

fn lock(dir: &Path) -> String {
    fs::read_to_string(dir.join("LOCK")).unwrap()
}

#[test]
fn a_second_job_is_refused_at_its_start_with_the_process_of_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (Store::new(dir.path()), Store::new(dir.path()));
    let begun = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    one.claim().unwrap();
    one.claim().unwrap();
    let CheckpointError::Held { holder: Some(holder), .. } = other.claim().unwrap_err() else { panic!() };
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert_eq!((&*holder.host, holder.pid), (host.trim(), std::process::id()));
    assert!((begun..begun + 60).contains(&holder.since), "{holder:?}");
    let text = other.claim().unwrap_err().to_string();
    let named = format!("is held by process {} on {} since 20", holder.pid, holder.host);
    assert!(text.contains(&named) && text.ends_with("or save to another folder"), "{text}");
    // Every change is refused, reading is not.
    assert!(matches!(other.begin(1), Err(CheckpointError::Held { .. })));
    assert!(matches!(other.keep(1), Err(CheckpointError::Held { .. })));
    assert!(matches!(other.roll_back(1), Err(CheckpointError::Held { .. })));
    job(&one, 1, false).unwrap();
    assert_eq!(other.latest().unwrap().manifest().step, 1);
    // A clone is the same job.
    let clone = one.clone();
    drop(one);
    assert!(matches!(other.claim(), Err(CheckpointError::Held { .. })));
    drop(clone);
    assert_eq!(lock(dir.path()), "");
    other.claim().unwrap();
}

#[test]
fn all_ranks_learn_that_another_job_holds_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (Store::new(dir.path()), Store::new(dir.path()));
    let claimed = |store: &Store| -> Vec<Result<(), Error>> {
        loopback::spawn(3, |comm| {
            let mut opt = Run { ranks: 3, ..Run::default() }.build(comm).unwrap();
            checkpoint::claim(&mut opt, store)
        })
        .unwrap()
    };
    assert!(claimed(&one).iter().all(Result::is_ok));
    for error in claimed(&other) {
        let failed = failed(error.unwrap_err());
        let holder = matches!(&failed.error, CheckpointError::Held { holder: Some(Holder { pid, .. }), .. } if *pid == std::process::id());
        assert!(failed.rank == 0 && holder, "{failed}");
    }
    assert!(matches!(refused(job(&other, 1, false)), CheckpointError::Held { .. }));
    job(&one, 1, false).unwrap();
}

#[test]
fn a_save_takes_the_folder_until_the_store_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (Store::new(dir.path()), Store::new(dir.path()));
    job(&one, 1, false).unwrap();
    assert!(matches!(refused(job(&other, 2, true)), CheckpointError::Held { .. }));
    drop(one);
    job(&other, 2, true).unwrap();
    assert_eq!(other.steps().unwrap(), [1, 2]);
}

#[test]
fn the_folder_of_a_dead_job_is_taken_over_on_its_host_alone() {
    let dir = tempfile::tempdir().unwrap();
    let here = fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_owned();
    let stands = |host: &str| {
        let text = format!(r#"{{"host":"{host}","pid":77,"since":1700000000}}"#);
        fs::write(dir.path().join("LOCK"), text).unwrap();
    };
    stands(&here);
    Store::new(dir.path()).claim().unwrap();
    stands("node17");
    let store = Store::new(dir.path());
    let error = store.claim().unwrap_err();
    let holder = Holder { host: "node17".to_owned(), pid: 77, since: 1_700_000_000 };
    assert_eq!(error, CheckpointError::Abandoned { dir: dir.path().to_owned(), holder });
    assert!(error.to_string().contains("process 77 on node17 since 2023-11-14T22:13:20Z"), "{error}");
    assert!(matches!(refused(job(&store, 1, false)), CheckpointError::Abandoned { .. }));
    // The refused job has neither kept the lock nor changed its file.
    assert!(lock(dir.path()).contains("node17"));
    let store = store.taking_over();
    job(&store, 1, false).unwrap();
    assert!(lock(dir.path()).contains(&here));
}

#[test]
fn a_lock_file_with_anything_in_it_harms_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let texts = [
        "x".repeat(1 << 20),
        "{\"host\":\"a\\u001b[2J\",\"pid\":1,\"since\":1}".to_owned(),
        "{\"host\":\"a\",\"pid\":-1,\"since\":1}".to_owned(),
        "[".repeat(4096),
    ];
    for text in texts {
        let holds = Store::new(dir.path());
        holds.claim().unwrap();
        fs::write(dir.path().join("LOCK"), &text).unwrap();
        let begun = Instant::now();
        let error = Store::new(dir.path()).claim().unwrap_err();
        assert_eq!(error, CheckpointError::Held { dir: dir.path().to_owned(), holder: None });
        assert!(error.to_string().contains("is held by another job"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(5));
        drop(holds);
        fs::write(dir.path().join("LOCK"), text).unwrap();
        Store::new(dir.path()).claim().unwrap();
    }
    // A time beyond the calendar is left out.
    let holder = Holder { host: "a".to_owned(), pid: 1, since: u64::MAX };
    assert_eq!(holder.to_string(), "process 1 on a");
}

#[test]
fn a_job_whose_lock_was_removed_saves_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    job(&store, 1, false).unwrap();
    fs::remove_file(dir.path().join("LOCK")).unwrap();
    let other = Store::new(dir.path());
    other.claim().unwrap();
    let error = refused(job(&store, 2, true));
    assert_eq!(error, CheckpointError::LostLock { path: dir.path().join("LOCK") });
    // Its end does not disturb the new holder.
    drop(store);
    assert!(matches!(Store::new(dir.path()).claim(), Err(CheckpointError::Held { holder: Some(_), .. })));
}

#[test]
fn a_job_that_finds_another_name_in_its_lock_saves_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    job(&store, 1, false).unwrap();
    // As by a host with locks of its own.
    let other = r#"{"host":"node17","pid":77,"since":1700000000}"#;
    fs::write(dir.path().join("LOCK"), other).unwrap();
    let lost = CheckpointError::LostLock { path: dir.path().join("LOCK") };
    for _ in 0..2 {
        assert_eq!(refused(job(&store, 2, true)), lost);
    }
    assert_eq!(store.claim(), Err(lost));
    drop(store);
    assert_eq!(lock(dir.path()), other);
}

#[test]
fn a_job_that_ends_leaves_another_name_in_its_lock() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    job(&store, 1, false).unwrap();
    let other = r#"{"host":"node17","pid":77,"since":1700000000}"#;
    fs::write(dir.path().join("LOCK"), other).unwrap();
    drop(store);
    assert_eq!(lock(dir.path()), other);
    assert!(matches!(Store::new(dir.path()).claim(), Err(CheckpointError::Abandoned { .. })));
}

#[test]
fn a_refused_save_keeps_a_folder_that_the_job_has_claimed() {
    let dir = tempfile::tempdir().unwrap();
    job(&Store::new(dir.path()), 1, false).unwrap();
    let (store, other) = (Store::new(dir.path()), Store::new(dir.path()));
    store.claim().unwrap();
    assert!(matches!(refused(job(&store, 2, false)), CheckpointError::OtherRun { .. }));
    assert!(matches!(other.claim(), Err(CheckpointError::Held { .. })));
}

#[test]
fn a_lock_file_that_cannot_be_read_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("LOCK");
    std::os::unix::fs::symlink("elsewhere", &path).unwrap();
    assert_eq!(Store::new(dir.path()).claim(), Err(CheckpointError::Link { path: path.clone() }));
    assert!(!dir.path().join("elsewhere").exists());
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(Store::new(dir.path()).claim(), Err(CheckpointError::Io { doing: "locking", .. })));
}

#[test]
fn a_folder_that_does_not_exist_is_named() {
    let dir = tempfile::tempdir().unwrap().path().join("none");
    assert_eq!(Store::new(&dir).claim(), Err(CheckpointError::NoFolder { dir: dir.clone() }));
    assert_eq!(refused(job(&Store::new(&dir), 1, false)), CheckpointError::NoFolder { dir });
}

/// As after a kill between the rename of a first step and the writing of LATEST.
#[test]
fn a_step_of_an_interrupted_first_save_is_not_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    job(&Store::new(dir.path()), 1, false).unwrap();
    assert_eq!(Store::new(dir.path()).newest(), Ok(Some(1)));
    fs::remove_file(dir.path().join("LATEST")).unwrap();
    let store = Store::new(dir.path());
    assert_eq!((store.newest(), store.steps()), (Ok(None), Ok(vec![1])));
    let error = refused(job(&store, 2, true));
    assert_eq!(error, CheckpointError::Nothing { dir: dir.path().to_owned() });
    // The job begins again, and its save replaces the step.
    job(&store, 1, false).unwrap();
    assert_eq!(store.newest(), Ok(Some(1)));
}

#[test]
fn a_run_saves_to_the_folder_of_no_other_run() {
    let dir = tempfile::tempdir().unwrap();
    let of_run = || Store::new(dir.path()).latest().unwrap().manifest().run;
    job(&Store::new(dir.path()), 1, false).unwrap();
    let first = of_run().unwrap();
    let latest = fs::read_to_string(dir.path().join("LATEST")).unwrap();
    assert!(latest.contains(&format!(r#""run":"{first}""#)), "{latest}");

    // A fresh job, also one with later steps.
    let store = Store::new(dir.path());
    let error = refused(job(&store, 2, false));
    assert_eq!(
        error,
        CheckpointError::OtherRun { dir: dir.path().to_owned(), found: Some(first), own: None }
    );
    // A job that may not save leaves the folder to others.
    Store::new(dir.path()).claim().unwrap();

    // A job that loads continues the run.
    job(&store, 2, true).unwrap();
    assert_eq!((of_run(), store.run()), (Some(first), Some(first)));
    drop(store);

    // A run of another folder is another one.
    let elsewhere = tempfile::tempdir().unwrap();
    let moved = Store::new(elsewhere.path());
    job(&moved, 1, false).unwrap();
    let other = moved.run().unwrap();
    assert_ne!(other, first);
    fs::remove_dir_all(dir.path().join("step-000000000002")).unwrap();
    drop(moved);
    for file in ["LATEST", "step-000000000001/manifest.json", "step-000000000001/rank-00000.safetensors"] {
        fs::copy(elsewhere.path().join(file), dir.path().join(file)).unwrap();
    }
    let store = Store::new(dir.path());
    job(&store, 2, true).unwrap();
    assert_eq!(of_run(), Some(other));
}

#[test]
fn a_job_adopts_the_checkpoints_of_another_run_by_a_word() {
    let dir = tempfile::tempdir().unwrap();
    job(&Store::new(dir.path()), 1, false).unwrap();
    let store = Store::new(dir.path()).adopting();
    job(&store, 2, false).unwrap();
    let first = store.open(1).unwrap().manifest().run;
    assert_eq!((store.steps().unwrap(), store.latest().unwrap().manifest().run), (vec![1, 2], first));
    // The steps' order counts as before.
    let behind = refused(job(&store, 1, false));
    assert!(matches!(behind, CheckpointError::Behind { .. }), "{behind}");
}

#[test]
fn checkpoints_of_earlier_versions_are_loaded_and_adopted_by_a_word() {
    let dir = tempfile::tempdir().unwrap();
    job(&Store::new(dir.path()), 1, false).unwrap();
    without_run(dir.path());
    let store = Store::new(dir.path());
    let error = refused(job(&store, 2, true));
    assert_eq!(error, CheckpointError::OtherRun { dir: dir.path().to_owned(), found: None, own: None });
    let store = store.adopting();
    job(&store, 2, true).unwrap();
    assert!(store.run().is_some() && store.latest().unwrap().manifest().run == store.run());
    assert_eq!(store.open(1).unwrap().manifest().run, None);
    drop(store);
    // From now on the run has a number, and a load is enough.
    job(&Store::new(dir.path()), 3, true).unwrap();
}

/// Makes the newest step, which is step 1, one of a version that did not number runs.
fn without_run(dir: &Path) {
    let path = dir.join("step-000000000001/manifest.json");
    let mut manifest = Store::new(dir).latest().unwrap().manifest().clone();
    manifest.run = None;
    let text = manifest.to_text();
    assert!(!text.contains("\"run\""), "{text}");
    fs::write(&path, &text).unwrap();
    let hash = Store::new(dir).open(1).unwrap().hash().to_owned();
    fs::write(dir.join("LATEST"), format!(r#"{{"step":1,"manifest":"{hash}"}}"#)).unwrap();
}

#[test]
fn a_run_has_sixteen_digits() {
    let text = |run: &str| serde_json::from_str::<RunId>(&format!("{run:?}")).map_err(|e| e.to_string());
    assert_eq!(text("00000000000000ff"), Ok(RunId(255)));
    for wrong in ["", "ff", "00000000000000FF", "+0000000000000ff", "0000000000000000", "000000000000000ff"] {
        assert!(text(wrong).is_err_and(|error| error.contains("16 hexadecimal digits")), "{wrong}");
    }
}

/// Rank 0's store is new at the second save, as after a restart of its process; the other rank's store knows the run.
#[test]
fn a_first_rank_with_a_new_store_continues_the_run_of_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let runs = loopback::spawn(2, |comm| {
        let mut opt: Optimizer = run().build(comm.clone()).unwrap();
        let mut store = Store::new(dir.path());
        train(&run(), &mut opt, 1..2);
        checkpoint::save(&mut opt, &store, Save::default()).unwrap();
        let first = store.run().unwrap();
        if comm.rank() == 0 {
            store = Store::new(dir.path());
            assert_eq!(store.run(), None);
        }
        train(&run(), &mut opt, 2..3);
        checkpoint::save(&mut opt, &store, Save::default()).unwrap();
        [first, store.run().unwrap()]
    });
    let runs = runs.unwrap().concat();
    assert!(runs.iter().all(|run| *run == runs[0]), "{runs:?}");
}
