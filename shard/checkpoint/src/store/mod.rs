//! Folder of checkpoints: a step becomes the newest one in a single atomic exchange.
//!
//! ```text
//! dir/LOCK                     locked by the job that saves here, as long as it runs; names its process
//! dir/tmp-000000000400/..      a step that is being saved; removed by the next holder of the lock
//! dir/step-000000000400/..     a complete step: files, and manifest.json
//! dir/LATEST                   {"step", "manifest": "<BLAKE3 of manifest.json>", "run": "<number of the run>"}
//! ```
//!
//! The files are synced first, then the manifest, then their folder. A rename gives the folder its final name, and its parent is synced
//! before LATEST is exchanged in the same way. LATEST names a complete step after a crash at any point.

pub(crate) mod direct_io;
pub(crate) mod disk;
pub(crate) mod draft;
pub(crate) mod found;
pub(crate) mod job_lock;
pub(crate) mod reader;
pub(crate) mod shard_file;
pub(crate) mod tensor_reader;
pub(crate) mod verify;

use crate::error::{CheckpointError, io, shown_run};
use crate::format::run_id::RunId;
use crate::store::disk::{Disk, Os};
use crate::store::draft::{Draft, Folder};
use crate::store::job_lock::{Busy, Claimed, JobLock};
use crate::store::reader::{Saved, read_all};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const LATEST: &str = "LATEST";
const NEXT: &str = "LATEST.tmp";
pub(crate) const MANIFEST: &str = "manifest.json";
const SAVED: &str = "step-";
const DRAFT: &str = "tmp-";

/// Maximum length of LATEST in bytes.
const LATEST_MOST: u64 = 4096;

/// Maximum length of a manifest in bytes; that of a checkpoint of 20 TB takes less than half of it.
pub(crate) const MANIFEST_MOST: u64 = 1 << 30;

/// Contents of LATEST.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Latest {
    step: u64,
    manifest: String,
    /// Missing in folders of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    run: Option<RunId>,
}

/// Folder of checkpoints. Reading it takes no lock.
///
/// **One job, one folder.** The first save, or [`claim`](Self::claim), takes the folder for this job, until the last clone of the store is
/// dropped or the process ends in any way. Another job is refused with [`CheckpointError::Held`], which names the process. Only rank 0's
/// store takes the folder; the other ranks' stores name the same one. A job keeps one store for its whole life.
///
/// **One run, one folder.** All checkpoints of a run have its number, which the first save draws and a load continues. A save to a folder
/// whose newest checkpoint this job has neither saved nor loaded with this store is [`CheckpointError::OtherRun`], and so is a save
/// beside checkpoints of an earlier version, which have no number, unless the store is [`adopting`](Self::adopting) them.
#[derive(Clone, Debug)]
pub struct Store {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    job: Arc<JobLock>,
    adopts: bool,
    takes_over: bool,
}

impl Store {
    /// Opens the checkpoints in `dir`, which must exist.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self::on(Arc::new(Os), dir)
    }

    /// Same as [`new`](Self::new) on another disk.
    pub fn on(disk: Arc<dyn Disk>, dir: impl Into<PathBuf>) -> Self {
        Store { disk, dir: dir.into(), job: Arc::default(), adopts: false, takes_over: false }
    }

    /// Makes the checkpoints in the folder those of this job's run, though this job has not loaded them. They may be of another run, or of
    /// an earlier version, which did not number runs.
    #[must_use]
    pub fn adopting(self) -> Self {
        Store { adopts: true, ..self }
    }

    /// Takes the folder over from a job of another host that has not released it ([`CheckpointError::Abandoned`]). That job must have ended:
    /// this host cannot find out. The folder of a dead job of this host needs no such word.
    #[must_use]
    pub fn taking_over(self) -> Self {
        Store { takes_over: true, ..self }
    }

    /// Takes the folder for this job now, instead of at its first save; rank 0 calls it, before it loads. Returns
    /// [`CheckpointError::Held`] with the holder's process while another job has the folder. It does not look at the run of the
    /// checkpoints there.
    pub fn claim(&self) -> Result<(), CheckpointError> {
        self.job.claim(&self.claimed())
    }

    /// Returns the run of this job; `None` before its first save or load here, and after a load of a checkpoint without a run.
    pub fn run(&self) -> Option<RunId> {
        self.job.run()
    }

    /// Continues `run` from now on.
    pub(crate) fn follow(&self, run: Option<RunId>) {
        self.job.set_run(run);
    }

    /// Returns the saved steps in ascending order.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let mut steps: Vec<u64> = self.names()?.iter().filter_map(|name| step_of(SAVED, name)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Returns the newest step, which a load without a number takes; `None` before a first save has ended. [`steps`](Self::steps) may also
    /// list a step in whose save the job was killed before it became the newest.
    pub fn newest(&self) -> Result<Option<u64>, CheckpointError> {
        match self.announced() {
            Ok(latest) => Ok(Some(latest.step)),
            Err(CheckpointError::Nothing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens the newest complete step.
    pub fn latest(&self) -> Result<Saved, CheckpointError> {
        let Latest { step, manifest, run } = self.announced()?;
        let saved = Saved::open(Arc::clone(&self.disk), &self.dir.join(name(SAVED, step)), Some(&manifest))?;
        same_run(run, saved.run())?;
        Ok(saved)
    }

    /// Reads LATEST.
    fn announced(&self) -> Result<Latest, CheckpointError> {
        let path = self.dir.join(LATEST);
        let text = match read_all(&*self.disk, &path, LATEST_MOST) {
            Err(CheckpointError::Io { kind: std::io::ErrorKind::NotFound, .. }) => {
                return Err(CheckpointError::Nothing { dir: self.dir.clone() });
            }
            text => text?,
        };
        let syntax = |error: serde_json::Error| CheckpointError::Syntax { path, reason: error.to_string() };
        // serde would also accept an array of both members, which no other reader does.
        let object = serde_json::from_slice::<serde_json::Map<_, _>>(&text);
        object.and_then(|_| serde_json::from_slice(&text)).map_err(syntax)
    }

    /// Opens the step that was saved as `step`.
    pub fn open(&self, step: u64) -> Result<Saved, CheckpointError> {
        Saved::open(Arc::clone(&self.disk), &self.dir.join(name(SAVED, step)), None)
    }

    /// Makes the step that was saved as `step` the newest, for a job that goes on from there, or because a later one is damaged. Later
    /// steps stay until the same steps are saved again.
    pub fn roll_back(&self, step: u64) -> Result<(), CheckpointError> {
        let _busy = self.change()?;
        let saved = self.open(step)?;
        self.announce(step, saved.hash(), saved.run())
    }

    /// Begins to save `step`, which must come after the newest step, and removes the remains of earlier attempts. Takes the folder for this
    /// job. Returns an error if LATEST cannot be trusted.
    pub fn begin(&self, step: u64) -> Result<Draft, CheckpointError> {
        let busy = self.change()?;
        // A job that may not save here leaves the folder to the one that may.
        let run = self.continued(step).inspect_err(|_| self.job.give_back(&busy))?;
        let names = self.names()?;
        for name in names.iter().filter(|name| step_of(DRAFT, name).is_some() || *name == NEXT) {
            let path = self.dir.join(name);
            self.disk.remove(&path).map_err(io("removing", &path))?;
        }
        // The step never became the newest; a job that resumed from an earlier step saves it again.
        if names.iter().any(|name| step_of(SAVED, name) == Some(step)) {
            self.retire(&[step])?;
        }
        let dir = self.dir.join(name(DRAFT, step));
        self.disk.create_dir(&dir).map_err(io("creating", &dir))?;
        self.follow(Some(run));
        Ok(Draft { store: self.clone(), step, dir, run, _busy: busy })
    }

    /// Returns the run that goes on with `step`, if this job may save it here.
    fn continued(&self, step: u64) -> Result<RunId, CheckpointError> {
        let own = self.run();
        let (latest, found) = match self.latest() {
            Ok(latest) => (latest.step(), latest.run()),
            Err(CheckpointError::Nothing { .. }) => return Ok(own.unwrap_or_else(RunId::new)),
            Err(error) => return Err(error),
        };
        let run = match (found, own) {
            (Some(found), Some(own)) if found == own => own,
            _ if self.adopts => found.or(own).unwrap_or_else(RunId::new),
            _ => return Err(CheckpointError::OtherRun { dir: self.dir.clone(), found, own }),
        };
        match latest {
            latest if latest < step => Ok(run),
            latest if latest == step => {
                Err(CheckpointError::Exists { path: self.dir.join(name(SAVED, step)) })
            }
            latest => Err(CheckpointError::Behind { dir: self.dir.clone(), step, latest }),
        }
    }

    /// Returns the folder in which `step` is being saved, by this or another rank.
    pub fn folder(&self, step: u64) -> Folder {
        Folder { disk: Arc::clone(&self.disk), dir: self.dir.join(name(DRAFT, step)) }
    }

    /// Removes all but the newest `keep` of the steps up to the one that LATEST names, which always stays.
    pub fn keep(&self, keep: usize) -> Result<(), CheckpointError> {
        let _busy = self.change()?;
        self.keep_newest(keep)
    }

    fn keep_newest(&self, keep: usize) -> Result<(), CheckpointError> {
        let latest = self.latest()?.step();
        let mut steps = self.steps()?;
        steps.retain(|&step| step <= latest);
        self.retire(&steps[..steps.len().saturating_sub(keep.max(1))])
    }

    /// Removes steps. All of them first get a draft's name and the rename is synced, so that after a crash no half-removed folder looks
    /// like a complete step.
    fn retire(&self, steps: &[u64]) -> Result<(), CheckpointError> {
        let stale = |step| self.dir.join(name(DRAFT, step));
        for &step in steps {
            let saved = self.dir.join(name(SAVED, step));
            self.disk.rename(&saved, &stale(step)).map_err(io("renaming", &saved))?;
        }
        if !steps.is_empty() {
            self.disk.sync_dir(&self.dir).map_err(io("syncing", &self.dir))?;
        }
        steps
            .iter()
            .map(|&step| stale(step))
            .try_for_each(|stale| self.disk.remove(&stale).map_err(io("removing", &stale)))
    }

    fn change(&self) -> Result<Busy, CheckpointError> {
        self.job.busy(&self.claimed())
    }

    fn claimed(&self) -> Claimed<'_> {
        Claimed { disk: &self.disk, dir: &self.dir, take_over: self.takes_over }
    }

    /// Exchanges LATEST.
    fn announce(&self, step: u64, manifest: &str, run: Option<RunId>) -> Result<(), CheckpointError> {
        let (next, latest) = (self.dir.join(NEXT), Latest { step, manifest: manifest.to_owned(), run });
        // A job that was stopped here has left this file, and no longer holds the lock.
        match self.disk.remove(&next) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(io("removing", &next)(error));
            }
            _ => {}
        }
        write(&*self.disk, &next, &serde_json::to_vec(&latest).unwrap_or_default())?;
        self.disk.rename(&next, &self.dir.join(LATEST)).map_err(io("renaming", &next))?;
        self.disk.sync_dir(&self.dir).map_err(io("syncing", &self.dir))
    }

    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let entries = self.disk.list(&self.dir).map_err(io("listing", &self.dir))?;
        Ok(entries.into_iter().map(|(name, _)| name).collect())
    }
}

/// Checks that LATEST, if it names a run, names that of the manifest.
fn same_run(latest: Option<RunId>, found: Option<RunId>) -> Result<(), CheckpointError> {
    match latest {
        Some(_) if latest != found => Err(contradiction("LATEST", latest, found)),
        _ => Ok(()),
    }
}

fn contradiction(what: &str, found: Option<RunId>, expected: Option<RunId>) -> CheckpointError {
    let reason = format!("it is of {}, not of {}", shown_run(found), shown_run(expected));
    CheckpointError::Contradiction { what: what.to_owned(), reason }
}

/// Writes and syncs a small file.
fn write(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut file = disk.create(path).map_err(io("creating", path))?;
    file.write_at(0, bytes).map_err(io("writing", path))?;
    file.sync().map_err(io("syncing", path))
}

/// Pads the number with zeros, so that names sort as steps do.
fn name(prefix: &str, step: u64) -> String {
    format!("{prefix}{step:012}")
}

fn step_of(prefix: &str, other: &str) -> Option<u64> {
    let step = other.strip_prefix(prefix)?.parse().ok()?;
    (name(prefix, step) == other).then_some(step)
}
