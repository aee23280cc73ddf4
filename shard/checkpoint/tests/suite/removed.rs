//! Steps that are removed, renamed or linked while other ranks read them.

use crate::common::{Run, draws};
use crate::crash::{DIR, save as save_by_hand};
use crate::hooked::{Call, Hooked};
use crate::layouts::train;
use crate::whole::{Whole, join, part};
use meshstep_checkpoint::{self as checkpoint, CheckpointError, Load, Save, Saved, Store};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::loopback::spawn;
use meshstep_shard::Stage;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Once};

struct Race {
    left: AtomicUsize,
    once: Once,
    then: Box<dyn Fn() + Send + Sync>,
}

impl Race {
    fn read(&self) {
        if self.left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_err() {
            self.once.call_once(&self.then);
        }
    }
}

/// Returns a disk on which `race` runs before a certain read.
fn racing(sim: Sim, race: Arc<Race>) -> Hooked<Sim> {
    Hooked::new(sim, move |call| {
        if let Call::Open | Call::Read(..) = call {
            race.read();
        }
        Ok(())
    })
}

fn run() -> Run {
    Run { ranks: 2, lens: vec![70, 33, 5], ..Run::default() }.stage(Stage::Zero3)
}

/// Saves steps 1 and 2, and rolls back to 1; returns the state of both.
fn two_steps(sim: &Sim) -> [Whole; 2] {
    let (run, store) = (run(), Store::on(Arc::new(sim.clone()), DIR));
    let ranks = spawn(run.ranks, |comm| {
        let mut opt = run.build(comm).unwrap();
        [1, 2].map(|step| {
            train(&run, &mut opt, step..step + 1);
            checkpoint::save(&mut opt, &store, Save::default()).unwrap();
            part(&opt)
        })
    });
    let (ones, twos) = ranks.unwrap().into_iter().map(|[one, two]| (one, two)).unzip();
    store.roll_back(1).unwrap();
    [join(ones), join(twos)]
}

/// Step 1 is removed before each read in turn: a load is of a complete step, or all ranks report that the step is gone.
#[test]
fn a_step_that_is_removed_while_it_is_read_is_said_to_be_gone() {
    let mut drawn = draws(1);
    for step in [Some(1), None].into_iter().filter(|_| drawn()) {
        let (mut whole, mut gone, mut apart) = (0, 0, 0);
        for reads in 0.. {
            let sim = Sim::new(DIR);
            let saved = two_steps(&sim);
            let other = Store::on(Arc::new(sim.clone()), DIR);
            let then = Box::new(move || {
                other.roll_back(2).unwrap();
                other.keep(1).unwrap();
            });
            let race = Arc::new(Race { left: AtomicUsize::new(reads), once: Once::new(), then });
            let store = Store::on(Arc::new(racing(sim.clone(), Arc::clone(&race))), DIR);
            let run = run();
            let ends = spawn(run.ranks, |comm| {
                let mut opt = run.build(comm).unwrap();
                let before = part(&opt);
                let loaded = checkpoint::load(&mut opt, &store, Load { step, ..Load::default() }).map(drop);
                let after = part(&opt);
                assert!(loaded.is_ok() || after == before, "nothing has changed");
                (loaded, after)
            });
            let (loaded, ends): (Vec<_>, Vec<_>) = ends.unwrap().into_iter().unzip();
            let told: Vec<_> =
                loaded.iter().map(|loaded| loaded.as_ref().map_err(ToString::to_string)).collect();
            assert!(told[0] == told[1], "{told:?}");
            match &loaded[0] {
                Ok(()) => {
                    let end = join(ends);
                    assert!(end == saved[0] || step.is_none() && end == saved[1], "{reads}: of no step");
                    whole += 1;
                }
                Err(checkpoint::Error::Failed(failed)) => {
                    let text = failed.to_string();
                    assert!(matches!(failed.error, CheckpointError::Gone { .. }), "{reads}: {text}");
                    assert!(text.contains("step-000000000001") && text.contains("load the newest"), "{text}");
                    gone += 1;
                }
                // One rank has read LATEST before the removal, the other after it.
                Err(error) => {
                    assert!(error.to_string().starts_with("ranks disagree on checkpoint to load"), "{error}");
                    apart += 1;
                }
            }
            if race.left.load(SeqCst) > 0 {
                break;
            }
        }
        assert!(whole > 0 && gone > 2, "{step:?}: {whole} {gone} {apart}");
    }
}

#[test]
fn files_that_are_open_are_read_on_and_a_network_says_that_they_are_gone() {
    let sim = Sim::new(DIR);
    let store = Store::on(Arc::new(sim.clone()), DIR);
    [1, 2].into_iter().for_each(|step| save_by_hand(&store, step, 40).unwrap());
    let one = store.open(1).unwrap();
    let file = one.file(0).unwrap();
    store.keep(1).unwrap();
    let (stored, mut room) = (one.manifest().stored().next().unwrap().1, vec![0; 1 << 20]);
    file.read(stored, (0, stored.bytes), &mut room, "w", |_, _| Ok(())).unwrap();
    let gone = |error: CheckpointError| matches!(error, CheckpointError::Gone { .. });
    assert!(gone(one.file(0).map(drop).unwrap_err()) && gone(one.verify().map(drop).unwrap_err()));
    assert!(gone(store.open(1).map(drop).unwrap_err()) && gone(store.open(77).map(drop).unwrap_err()));
    // A single missing file is damage.
    let two = store.latest().unwrap();
    sim.forget(&two.dir().join("rank-1.safetensors"));
    let error = two.verify().unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Unreadable { what, .. } if what.contains("tensor \"w\"")),
        "{error}"
    );

    let network = Hooked::new(sim, |call| match call {
        Call::Read(path, _) if path.ends_with("rank-0.safetensors") => {
            Err(ErrorKind::StaleNetworkFileHandle.into())
        }
        _ => Ok(()),
    });
    let error = Store::on(Arc::new(network), DIR).latest().unwrap().verify().unwrap_err();
    assert!(gone(error.clone()) && error.to_string().contains("rank-0.safetensors"), "{error}");
}

#[test]
fn a_folder_that_is_a_link_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    [1, 2].into_iter().for_each(|step| save_by_hand(&store, step, 8).unwrap());
    for step in [1, 2] {
        let name = format!("step-{step:012}");
        let (path, moved) = (dir.path().join(&name), elsewhere.path().join(&name));
        std::fs::rename(&path, &moved).unwrap();
        std::os::unix::fs::symlink(&moved, &path).unwrap();
        let error = store.open(step).map(drop).unwrap_err();
        assert!(matches!(&error, CheckpointError::Link { path: found } if *found == path), "{error}");
        // The caller may name a link itself.
        assert_eq!(Saved::at(&path).unwrap().manifest().step, step);
    }
    assert!(matches!(store.latest(), Err(CheckpointError::Link { .. })));
    assert!(matches!(store.begin(3), Err(CheckpointError::Link { .. })));
}

#[test]
fn a_folder_with_the_name_of_another_step_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path());
    [1, 2].into_iter().for_each(|step| save_by_hand(&store, step, 8).unwrap());
    let [one, two, seven] = [1, 2, 7].map(|step| dir.path().join(format!("step-{step:012}")));
    std::fs::rename(&one, &seven).unwrap();
    for saved in [store.open(7), Saved::at(&seven)] {
        let error = saved.map(drop).unwrap_err();
        assert!(matches!(error, CheckpointError::Renamed { step: 1, .. }), "{error}");
        assert!(error.to_string().contains("step-000000000007 holds step 1"), "{error}");
    }
    // LATEST vouches for a manifest, but not for the name of its folder.
    std::fs::remove_dir_all(&seven).unwrap();
    std::fs::rename(&two, &seven).unwrap();
    let latest = dir.path().join("LATEST");
    let text = std::fs::read_to_string(&latest).unwrap().replace("\"step\":2", "\"step\":7");
    std::fs::write(&latest, text).unwrap();
    assert!(matches!(store.latest(), Err(CheckpointError::Renamed { step: 2, .. })));
    // A folder of any other name may hold any step.
    let best = dir.path().join("best");
    std::fs::rename(&seven, &best).unwrap();
    assert_eq!(Saved::at(&best).unwrap().manifest().step, 2);
}
