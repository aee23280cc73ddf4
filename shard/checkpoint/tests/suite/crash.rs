//! The newest complete step loads after any crash, and after a failure of any write.

use crate::common::cases;
use meshstep_checkpoint::{
    CheckpointError, Disk as _, FORMAT, Manifest, PieceEntry, SlotEntry, Store, TensorEntry, Type, Vector,
    WINDOW,
};
use meshstep_checkpoint_cases::Sim;
use rand::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

pub(crate) const DIR: &str = "/run";

/// Name of the bytes in errors.
const NAME: &str = "slot \"param\" of tensor \"w\"";

/// Saves two files of a tensor of `2 * half` numbers, which encode the step.
pub(crate) fn save(store: &Store, step: u64, half: u64) -> Result<(), CheckpointError> {
    let draft = store.begin(step)?;
    let (mut files, mut pieces) = (Vec::new(), Vec::new());
    for rank in 0..2 {
        let key = format!("w.{rank}");
        let vectors = [Vector { key: key.clone(), dtype: Type::F32, shape: vec![half] }];
        let mut writer = draft.file(rank as usize, &format!("rank-{rank}.safetensors"), &vectors)?;
        writer.begin();
        for chunk in values(step, rank, half).chunks(100_000) {
            writer.write(chunk)?;
        }
        let (file, mut stored) = writer.finish()?;
        files.push(file);
        let (range, stored) = ([rank * half, (rank + 1) * half], stored.remove(0));
        pieces.push(PieceEntry { offsets: vec![0, 0], extents: vec![2, half], range, key, stored });
    }
    let slots = [("param".to_owned(), SlotEntry { dtype: Type::F32, pieces })].into();
    let tensor = TensorEntry { shape: vec![2, half], t: step, slots };
    let tensors = [("w".to_owned(), tensor)].into();
    let (settings, blobs) = (BTreeMap::new(), BTreeMap::new());
    let (run, mesh) = (Some(draft.run()), "dp=2".into());
    draft.publish(&Manifest { format: FORMAT, step, run, mesh, files, tensors, settings, blobs })
}

/// Opens the folder of a job that starts again, and reads its steps without a call that would tell the store their run.
fn store_on(sim: &Sim) -> Store {
    Store::on(Arc::new(sim.clone()), DIR).adopting()
}

/// Checks that every existing step is complete, and returns the steps.
pub(crate) fn all(store: &Store) -> Result<Vec<u64>, CheckpointError> {
    let steps = store.steps()?;
    steps.iter().try_for_each(|&step| store.open(step)?.verify().map(drop))?;
    Ok(steps)
}

fn values(step: u64, rank: u64, half: u64) -> Vec<u8> {
    let mut all = Vec::with_capacity(4 * half as usize);
    let value = |i: u64| ((step * 2 + rank) * half + i) as f32;
    (0..half).for_each(|i| all.extend_from_slice(&value(i).to_le_bytes()));
    all
}

/// Loads the newest step, reading every byte in every way.
pub(crate) fn load(store: &Store, half: u64) -> Result<u64, CheckpointError> {
    let saved = store.latest()?;
    let manifest = saved.manifest();
    let mut room = vec![0; WINDOW as usize];
    for (rank, piece) in manifest.tensors["w"].slots["param"].pieces.iter().enumerate() {
        let expected = values(manifest.step, rank as u64, half);
        let mut bytes = Vec::new();
        let file = saved.file(piece.stored.file)?;
        file.read(&piece.stored, (0, piece.stored.bytes), &mut room, NAME, |at, part| {
            assert_eq!(at as usize, bytes.len(), "in order");
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        assert!(bytes == expected, "what was read is what was saved");
    }
    saved.verify()?;
    Ok(manifest.step)
}

#[test]
fn what_was_saved_is_loaded_and_the_newest_is_the_latest() {
    let sim = Sim::new(DIR);
    let store = store_on(&sim);
    assert!(matches!(store.latest(), Err(CheckpointError::Nothing { .. })));
    // More than a window, and not a multiple of one.
    let half = WINDOW / 4 + 33;
    for step in [10, 20, 30] {
        save(&store, step, half).unwrap();
        assert_eq!(load(&store, half), Ok(step));
    }
    assert!(matches!(save(&store, 30, half), Err(CheckpointError::Exists { .. })));
    assert!(matches!(save(&store, 20, half), Err(CheckpointError::Behind { step: 20, latest: 30, .. })));
    assert_eq!(store.steps(), Ok(vec![10, 20, 30]));
    assert_eq!(store.open(20).unwrap().manifest().step, 20);
    store.keep(2).unwrap();
    assert_eq!((store.steps(), load(&store, half)), (Ok(vec![20, 30]), Ok(30)));
}

#[test]
fn a_job_that_rolls_back_loses_no_step_but_those_it_saves_again() {
    let sim = Sim::new(DIR);
    let store = store_on(&sim);
    [10, 20, 30, 40].into_iter().for_each(|step| save(&store, step, 16).unwrap());
    assert!(store.roll_back(15).is_err());
    store.roll_back(20).unwrap();
    assert_eq!(load(&store, 16), Ok(20));
    save(&store, 25, 16).unwrap();
    assert_eq!(store.steps(), Ok(vec![10, 20, 25, 30, 40]));
    store.keep(2).unwrap();
    assert_eq!((store.steps(), load(&store, 16)), (Ok(vec![20, 25, 30, 40]), Ok(25)));
    save(&store, 30, 16).unwrap();
    // Nor does a job that finds no LATEST lose steps.
    sim.remove(&Path::new(DIR).join("LATEST")).unwrap();
    save(&store, 35, 16).unwrap();
    assert_eq!((store.steps(), load(&store, 16)), (Ok(vec![20, 25, 30, 35, 40]), Ok(35)));
}

#[test]
fn one_job_saves_at_a_time() {
    let sim = Sim::new(DIR);
    let store = store_on(&sim);
    let draft = store.begin(1).unwrap();
    assert!(matches!(store.begin(2), Err(CheckpointError::Locked { .. })));
    drop(draft);
    save(&store, 2, 8).unwrap();
    assert!(!sim.files().iter().any(|path| path.to_str().unwrap().contains("tmp")), "{:?}", sim.files());
}

#[test]
fn after_a_crash_anywhere_the_latest_step_is_complete() {
    let sim = Sim::new(DIR);
    let store = store_on(&sim);
    let mut ends = Vec::new();
    for step in [1, 2, 3] {
        save(&store, step, 16).unwrap();
        ends.push(sim.events());
    }
    store.keep(1).unwrap();
    let (mut olds, mut news) = (0, 0);
    // With fewer than six seeds, possibly none shows unsynced data.
    let (seeds, restarts) = (u64::from(cases(16, 200).max(6)), u64::from(cases(4, 20)));
    for count in ends[0]..=sim.events() {
        for seed in 0..seeds {
            let random = &mut StdRng::seed_from_u64(seed);
            let after = sim.crashed(count, random);
            let store = store_on(&after);
            let begun = ends.iter().filter(|&&end| end <= count).count() as u64;
            let step =
                load(&store, 16).unwrap_or_else(|error| panic!("before event {count}, seed {seed}: {error}"));
            assert!(step == begun || step == begun + 1, "step {step} of {begun} or the next");
            all(&store).unwrap();
            if step == begun {
                olds += 1
            } else {
                news += 1
            }
            // A restarted job saves the next step, which may exist already although its save returned an error.
            if seed < restarts {
                store.keep(1).unwrap();
                assert_eq!(load(&store, 16), Ok(step));
                save(&store, step + 1, 16).unwrap();
                assert_eq!(load(&store, 16), Ok(step + 1));
                let second = after.crashed(random.random_range(0..=after.events()), random);
                let store = store_on(&second);
                let newest = load(&store, 16).unwrap();
                assert!(all(&store).unwrap().contains(&newest) && (newest == step || newest == step + 1));
            }
        }
    }
    assert!(olds > 0 && news > 0, "{olds} {news}");
}

#[test]
fn a_failure_before_any_event_leaves_the_step_before() {
    let sim = Sim::new(DIR);
    save(&store_on(&sim), 1, 16).unwrap();
    let first = sim.events();
    save(&store_on(&sim), 2, 16).unwrap();
    let end = sim.events();
    for event in first..end {
        let sim = Sim::new(DIR);
        let store = store_on(&sim);
        save(&store, 1, 16).unwrap();
        sim.fail_at(event);
        let error = save(&store, 2, 16).unwrap_err();
        assert!(
            matches!(error, CheckpointError::Io { kind: std::io::ErrorKind::StorageFull, .. }),
            "{error}"
        );
        let step = load(&store, 16).unwrap();
        // Before the very last sync LATEST is exchanged already, though a crash may undo it.
        assert_eq!(step, if event + 1 == end { 2 } else { 1 }, "event {event}");
    }
}

#[test]
fn what_is_left_of_an_announcement_stops_no_roll_back() {
    let sim = Sim::new(DIR);
    let store = store_on(&sim);
    [10, 20].into_iter().for_each(|step| save(&store, step, 16).unwrap());
    let left = Path::new(DIR).join("LATEST.tmp");
    sim.create(&left).unwrap().write_at(0, b"{").unwrap();
    store.roll_back(10).unwrap();
    assert_eq!(load(&store, 16), Ok(10));
    assert!(!sim.files().contains(&left));
}

#[test]
fn after_a_crash_anywhere_in_a_roll_back_the_newest_step_is_that_of_before_or_after() {
    let sim = Sim::new(DIR);
    let store = store_on(&sim);
    [10, 20, 30].into_iter().for_each(|step| save(&store, step, 16).unwrap());
    let begun = sim.events();
    store.roll_back(10).unwrap();
    let (end, mut found) = (sim.events(), [0; 2]);
    for count in begun..=end {
        for seed in 0..u64::from(cases(60, 200)) {
            let after = sim.crashed(count, &mut StdRng::seed_from_u64(seed));
            let store = store_on(&after);
            let step =
                load(&store, 16).unwrap_or_else(|error| panic!("before event {count}, seed {seed}: {error}"));
            assert!(step == 30 && count < end || step == 10 && count > begun, "{step} before event {count}");
            assert_eq!(all(&store), Ok(vec![10, 20, 30]));
            found[usize::from(step == 10)] += 1;
            // The interrupted job rolls back again.
            store.roll_back(10).unwrap();
            assert_eq!(load(&store, 16), Ok(10));
            save(&store, 20, 16).unwrap();
            assert_eq!((load(&store, 16), store.steps()), (Ok(20), Ok(vec![10, 20, 30])));
        }
    }
    assert!(found.iter().all(|&times| times > 0), "{found:?}");
}
