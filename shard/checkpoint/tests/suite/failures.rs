//! A failure on one rank is the same error on all ranks, changes nothing, and leaves earlier checkpoints intact.

use crate::common::{Run, draws, long, turns};
use crate::faulty::{Faulty, Then};
use crate::layouts::train;
use crate::whole::part;
use meshstep_cases::{Effort, effort};
use meshstep_checkpoint::{
    self as checkpoint, CheckpointError, Disk, Error, Failed, Load, Os, Save, Saver, Store,
};
use meshstep_checkpoint_cases::Sim;
use meshstep_comm::Communicator;
use meshstep_shard::{Optimizer, Stage};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

const DIR: &str = "/run";
const RANKS: usize = 3;

pub(crate) fn failed(error: Error) -> Failed {
    match error {
        Error::Failed(failed) => *failed,
        other => panic!("{other}"),
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Save,
    Beside,
    Load,
}

const HOWS: [How; 3] = [How::Save, How::Beside, How::Load];

impl How {
    fn call(self, opt: &mut Optimizer, store: &Store, step: u64) -> Result<(), Error> {
        let blobs = vec![("loader", &[1, 2][..])];
        let save = Save { step: Some(step), keep: Some(1), blobs, ..Save::default() };
        match self {
            How::Save => checkpoint::save(opt, store, save).map(drop),
            How::Beside => checkpoint::save_async(opt, &mut Saver::default(), store, save)?.join().map(drop),
            How::Load => checkpoint::load(opt, store, Load::default()).map(drop),
        }
    }
}

/// Returns the distance between the calls that are tested; each rank begins with another call.
fn apart() -> usize {
    match effort() {
        Effort::Tenth => 10,
        Effort::Normal => 3,
        Effort::Long => 1,
    }
}

/// Disk, folder on it, and the rank with counted calls.
#[derive(Debug)]
struct Place<'a, D> {
    disk: D,
    dir: &'a Path,
    at: usize,
    /// True if that rank made no more calls than were let through.
    through: AtomicBool,
}

/// Saves, then saves or loads on every rank, with `then` before each call of one rank's disk in turn; returns the errors. `again` runs
/// before the checkpoints are inspected.
fn on_rank<D: Disk + Clone + 'static>(
    comm: &Arc<dyn Communicator>,
    place: &Place<'_, D>,
    how: How,
    then: Then,
    again: &dyn Fn(),
) -> Vec<Failed> {
    let (Place { disk, dir, at, through }, rank) = (place, comm.rank());
    let run = &Run { ranks: RANKS, ..Run::default() }.stage(Stage::Zero2);
    // A disk that is gone keeps its contents.
    let room = matches!(then, Then::Refuse(_, false));
    let faulty = Faulty::with(disk.clone(), then);
    let store = Store::on(faulty.disk(), *dir);
    let sound = Store::on(Arc::new(disk.clone()), *dir);
    let mut opt = run.build(Arc::clone(comm)).unwrap();
    train(run, &mut opt, 1..3);
    checkpoint::save(&mut opt, &store, Save { step: Some(0), ..Save::default() }).unwrap();
    let before = part(&opt);
    let mut errors = Vec::new();
    for calls in (at % apart()..).step_by(apart()) {
        faulty.after(if rank == *at { calls } else { usize::MAX });
        let done = how.call(&mut opt, &store, 1 + calls as u64);
        assert!(part(&opt) == before, "call {calls}: nothing has changed");
        comm.barrier().unwrap();
        if rank == *at {
            through.store(faulty.never_came(), SeqCst);
            again();
        }
        comm.barrier().unwrap();
        // The newest step is complete on every rank.
        let latest = checkpoint::load(&mut opt, &sound, Load::default()).unwrap();
        latest.saved.verify().unwrap();
        assert!(part(&opt) == before, "call {calls}: the newest is what was saved");
        match done {
            Ok(()) if through.load(SeqCst) => break,
            // The failure came too late to matter.
            Ok(()) => continue,
            Err(error) => errors.push(failed(error)),
        }
        if rank == 0 && room {
            left(disk, dir, 1 + calls as u64, errors.last().unwrap());
        }
    }
    train(run, &mut opt, 3..4);
    errors
}

/// Checks that a failed save takes no space, unless its step has become the newest nevertheless.
fn left(disk: &(impl Disk + Clone + 'static), dir: &Path, step: u64, failed: &Failed) {
    let names = disk.list(dir).unwrap();
    let newest = Store::on(Arc::new(disk.clone()), dir).latest().unwrap().manifest().step;
    let saved = (newest != step).then(|| format!("step-{step:012}"));
    for left in saved.into_iter().chain([format!("tmp-{step:012}"), "LATEST.tmp".to_owned()]) {
        assert!(names.iter().all(|(name, _)| *name != left), "{left} is left after {failed}");
    }
}

/// Returns the errors of all ranks, which are the same.
fn told<D: Disk + Clone + 'static>(
    place: &Place<'_, D>,
    how: How,
    then: impl Fn() -> Then + Sync,
    again: &(dyn Fn() + Sync),
) -> Vec<Failed> {
    let ranks = meshstep_comm::loopback::spawn(RANKS, |comm| on_rank(&comm, place, how, then(), again));
    let mut ranks = ranks.unwrap();
    assert!(ranks.iter().all(|errors| *errors == ranks[0]), "{ranks:?}");
    assert!(ranks[0].len() * apart() > 5, "rank {} makes some calls, {}", place.at, ranks[0].len());
    ranks.remove(0)
}

/// Returns an error, and the owner of the bytes it is about.
fn bare(error: &CheckpointError) -> (&CheckpointError, Option<&str>) {
    match error {
        CheckpointError::Unreadable { what, source } => (source, Some(what)),
        error => (error, None),
    }
}

#[test]
fn every_refusal_of_a_disk_is_one_error_on_all_ranks() {
    let (places, mut drawn) = ([(0, false), (1, false), (2, false), (0, true), (2, true)], draws(1));
    for (h, how) in HOWS.into_iter().enumerate().filter(|_| drawn()) {
        for (at, gone) in turns(&places, 2 * h, 2) {
            let place =
                Place { disk: Sim::new(DIR), dir: Path::new(DIR), at, through: AtomicBool::new(false) };
            let refusal = || io::Error::new(ErrorKind::PermissionDenied, "as was asked for");
            let mut named = 0;
            for Failed { rank, error } in told(&place, how, || Then::Refuse(Box::new(refusal), gone), &|| {})
            {
                assert_eq!(rank, at);
                let (error, whose) = bare(&error);
                let refused = matches!(error, CheckpointError::Io { kind: ErrorKind::PermissionDenied, .. });
                assert!(refused, "{error}");
                named += usize::from(whose.is_some_and(|whose| whose.contains("of tensor \"p")));
            }
            let told = if how == How::Load { named > if long() { 3 } else { 0 } } else { named <= 3 };
            assert!(told, "what cannot be read of tensors is named: {named} by {how:?}");
        }
    }
}

/// Repeats this in folders of the operating system, with the system's own errors.
#[test]
fn every_call_finds_the_disk_full() {
    /// Returns `ENOSPC` for every write.
    const FULL: i32 = 28;
    let mut drawn = draws(1);
    for how in [How::Save, How::Beside] {
        for at in [0, 1].into_iter().filter(|_| drawn()) {
            let dir = tempfile::tempdir().unwrap();
            let place = Place { disk: Os, dir: dir.path(), at, through: AtomicBool::new(false) };
            let refusal = || io::Error::from_raw_os_error(FULL);
            for Failed { rank, error } in told(&place, how, || Then::Refuse(Box::new(refusal), false), &|| {})
            {
                let CheckpointError::Io { kind, path, .. } = &error else { panic!("{error}") };
                assert_eq!((rank, *kind), (at, ErrorKind::StorageFull), "{error}");
                assert!(path.starts_with(dir.path()), "{error}");
            }
        }
    }
}

/// A folder of the operating system vanishes before any call and comes back afterwards, as if the disk had been unplugged.
#[test]
fn a_folder_that_vanishes_amid_any_call_is_one_error_on_all_ranks() {
    let mut drawn = draws(1);
    for how in HOWS {
        for at in [0, 1].into_iter().filter(|_| drawn()) {
            let root = tempfile::tempdir().unwrap();
            let (dir, away) = (root.path().join("run"), root.path().join("away"));
            std::fs::create_dir(&dir).unwrap();
            let place = Place { disk: Os, dir: &dir, at, through: AtomicBool::new(false) };
            let vanish = || {
                let (dir, away) = (dir.clone(), away.clone());
                Then::Do(Box::new(move || std::fs::rename(&dir, &away).unwrap()))
            };
            let again = || drop(std::fs::rename(&away, &dir));
            for Failed { error, .. } in told(&place, how, vanish, &again) {
                let missing = matches!(
                    bare(&error).0,
                    CheckpointError::Io { kind: ErrorKind::NotFound, .. }
                        | CheckpointError::Elsewhere { .. }
                        | CheckpointError::Nothing { .. }
                        | CheckpointError::Gone { .. }
                );
                assert!(missing && error.to_string().contains(dir.to_str().unwrap()), "{error}");
            }
        }
    }
}
