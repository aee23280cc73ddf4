//! A folder of checkpoints: how a step becomes the newest one, all at once.
//!
//! ```text
//! dir/LOCK                     held while one job saves here
//! dir/tmp-000000000400/..      a step on its way; swept by whoever holds the lock next
//! dir/step-000000000400/..     a complete step: files, and manifest.json
//! dir/LATEST                   {"step", "manifest": "<BLAKE3 of manifest.json>"}
//! ```
//!
//! Files are synced, then the manifest, then their folder; a rename gives the folder its name, and its parent is synced before
//! LATEST is exchanged in the same way. Whatever a crash undoes, LATEST names a complete step.

use super::disk::{Disk, Os};
use super::error::{CheckpointError, io};
use super::manifest::Manifest;
use super::saved::{Saved, read_all};
use super::shard_file::{ShardWriter, Vector};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const LOCK: &str = "LOCK";
const LATEST: &str = "LATEST";
const NEXT: &str = "LATEST.tmp";
pub(super) const MANIFEST: &str = "manifest.json";
const PROOF: &str = "proof";
const SAVED: &str = "step-";
const DRAFT: &str = "tmp-";

/// Bytes LATEST may have.
const LATEST_MOST: u64 = 4096;

/// Bytes a manifest may have: that of 20 TB takes less than half of it.
pub(super) const MANIFEST_MOST: u64 = 1 << 30;

/// What LATEST says.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Latest {
    step: u64,
    manifest: String,
}

/// A folder of checkpoints.
#[derive(Clone, Debug)]
pub struct Store {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
}

/// The folder of a step on its way, as any rank sees it.
#[derive(Clone, Debug)]
pub struct Folder {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
}

/// A step on its way; nobody else saves to the folder meanwhile. Dropping it leaves a folder that the next one sweeps.
#[derive(Debug)]
pub struct Draft {
    store: Store,
    step: u64,
    dir: PathBuf,
    /// Until this is dropped.
    _lock: Box<dyn Debug + Send + Sync>,
}

impl Store {
    /// The checkpoints in `dir`, which exists.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self::on(Arc::new(Os), dir)
    }

    /// The same on another disk.
    pub fn on(disk: Arc<dyn Disk>, dir: impl Into<PathBuf>) -> Self {
        Store { disk, dir: dir.into() }
    }

    /// Steps that were saved, in ascending order.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let mut steps: Vec<u64> = self.names()?.iter().filter_map(|name| step_of(SAVED, name)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The newest complete step.
    pub fn latest(&self) -> Result<Saved, CheckpointError> {
        let Latest { step, manifest } = self.announced()?;
        Saved::open(Arc::clone(&self.disk), &self.dir.join(name(SAVED, step)), Some(&manifest))
    }

    /// What LATEST says.
    fn announced(&self) -> Result<Latest, CheckpointError> {
        let path = self.dir.join(LATEST);
        let text = match read_all(&*self.disk, &path, LATEST_MOST) {
            Err(CheckpointError::Io { kind: std::io::ErrorKind::NotFound, .. }) => {
                return Err(CheckpointError::Nothing { dir: self.dir.clone() });
            }
            text => text?,
        };
        let syntax = |error: serde_json::Error| CheckpointError::Syntax { path, reason: error.to_string() };
        // An array of both would do for serde, and for no other reader.
        let object = serde_json::from_slice::<serde_json::Map<_, _>>(&text);
        object.and_then(|_| serde_json::from_slice(&text)).map_err(syntax)
    }

    /// The step that was saved as `step`.
    pub fn open(&self, step: u64) -> Result<Saved, CheckpointError> {
        Saved::open(Arc::clone(&self.disk), &self.dir.join(name(SAVED, step)), None)
    }

    /// Makes the step that was saved as `step` the newest, for a job that goes on from there, or where a later one is damaged. Later
    /// ones stay until the same steps are saved again.
    pub fn roll_back(&self, step: u64) -> Result<(), CheckpointError> {
        let _lock = self.lock()?;
        self.announce(step, self.open(step)?.hash())
    }

    /// Begins to save `step`, which comes after the newest one, and removes what earlier attempts left. An error where LATEST cannot
    /// be trusted.
    pub fn begin(&self, step: u64) -> Result<Draft, CheckpointError> {
        let lock = self.lock()?;
        match self.latest().map(|latest| latest.manifest().step) {
            Err(CheckpointError::Nothing { .. }) => {}
            Ok(latest) if latest < step => {}
            Ok(latest) if latest == step => {
                return Err(CheckpointError::Exists { path: self.dir.join(name(SAVED, step)) });
            }
            Ok(latest) => return Err(CheckpointError::Behind { dir: self.dir.clone(), step, latest }),
            Err(error) => return Err(error),
        }
        let names = self.names()?;
        for name in names.iter().filter(|name| step_of(DRAFT, name).is_some() || *name == NEXT) {
            let path = self.dir.join(name);
            self.disk.remove(&path).map_err(io("removing", &path))?;
        }
        // A step that never became the newest is taken again by a job that went on from one before.
        if names.iter().any(|name| step_of(SAVED, name) == Some(step)) {
            self.retire(&[step])?;
        }
        let dir = self.dir.join(name(DRAFT, step));
        self.disk.create_dir(&dir).map_err(io("creating", &dir))?;
        Ok(Draft { store: self.clone(), step, dir, _lock: lock })
    }

    /// The folder in which `step` is on its way, whoever has begun it.
    pub fn folder(&self, step: u64) -> Folder {
        Folder { disk: Arc::clone(&self.disk), dir: self.dir.join(name(DRAFT, step)) }
    }

    /// Removes all but the newest `keep` of the steps up to the one LATEST names, which stays.
    pub fn keep(&self, keep: usize) -> Result<(), CheckpointError> {
        let _lock = self.lock()?;
        self.keep_newest(keep)
    }

    fn keep_newest(&self, keep: usize) -> Result<(), CheckpointError> {
        let latest = self.latest()?.manifest().step;
        let mut steps = self.steps()?;
        steps.retain(|&step| step <= latest);
        self.retire(&steps[..steps.len().saturating_sub(keep.max(1))])
    }

    /// Removes steps. They have a draft's name, which would survive a crash, before anything in them goes: what is half removed is
    /// no step.
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

    fn lock(&self) -> Result<Box<dyn Debug + Send + Sync>, CheckpointError> {
        let path = self.dir.join(LOCK);
        let lock = self.disk.lock(&path).map_err(io("locking", &path))?;
        lock.ok_or_else(|| CheckpointError::Locked { dir: self.dir.clone() })
    }

    /// Exchanges LATEST.
    fn announce(&self, step: u64, manifest: &str) -> Result<(), CheckpointError> {
        let (next, latest) = (self.dir.join(NEXT), Latest { step, manifest: manifest.to_owned() });
        // Whoever was stopped here before has left one, and holds the lock no more.
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

impl Folder {
    /// Begins file `index`, for `vectors`.
    pub fn file(&self, index: usize, file: &str, vectors: &[Vector]) -> Result<ShardWriter, CheckpointError> {
        let path = self.dir.join(file);
        ShardWriter::new(self.disk.create(&path).map_err(io("creating", &path))?, &path, index, vectors)
    }

    /// Makes the names of its files last.
    pub fn sync(&self) -> Result<(), CheckpointError> {
        self.disk.sync_dir(&self.dir).map_err(io("syncing", &self.dir))
    }

    /// Leaves `proof` here, for others to see.
    pub fn show(&self, proof: u64) -> Result<(), CheckpointError> {
        write(&*self.disk, &self.dir.join(PROOF), &proof.to_le_bytes())
    }

    /// Whether this is where `proof` was left.
    pub fn shows(&self, proof: u64) -> Result<(), CheckpointError> {
        let elsewhere = CheckpointError::Elsewhere { dir: self.dir.clone() };
        match read_all(&*self.disk, &self.dir.join(PROOF), 8) {
            Ok(found) if found == proof.to_le_bytes() => Ok(()),
            Ok(_) | Err(CheckpointError::Io { kind: std::io::ErrorKind::NotFound, .. }) => Err(elsewhere),
            Err(error) => Err(error),
        }
    }

    /// Removes what was left.
    pub fn hide(&self) -> Result<(), CheckpointError> {
        let path = self.dir.join(PROOF);
        self.disk.remove(&path).map_err(io("removing", &path))
    }
}

impl Draft {
    /// Its folder.
    pub fn folder(&self) -> Folder {
        self.store.folder(self.step)
    }

    /// Begins file `index`, for `vectors`.
    pub fn file(&self, index: usize, file: &str, vectors: &[Vector]) -> Result<ShardWriter, CheckpointError> {
        self.folder().file(index, file, vectors)
    }

    /// Makes the step the newest one. Every file is complete.
    pub fn publish(self, manifest: &Manifest) -> Result<(), CheckpointError> {
        self.complete(manifest)
    }

    /// The same, and removes all but the newest `keep` steps; nobody begins another meanwhile. An error in removing leaves the step
    /// the newest one.
    pub fn publish_keeping(self, manifest: &Manifest, keep: usize) -> Result<(), CheckpointError> {
        self.complete(manifest)?;
        self.store.keep_newest(keep)
    }

    /// Gives the step up, as far as the disk allows; the next one sweeps the rest.
    pub fn discard(self) {
        self.remove();
    }

    fn remove(&self) {
        let _ = self.store.disk.remove(&self.dir);
    }

    fn complete(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        // What nobody can use is no reason for a disk to stay full.
        self.exchange(manifest).inspect_err(|_| self.give_up())
    }

    /// Removes the step under whichever name it has, unless it has become the newest after all.
    fn give_up(&self) {
        self.remove();
        let Draft { store, step, .. } = self;
        let _ = store.disk.remove(&store.dir.join(NEXT));
        let newest = match store.announced() {
            Ok(latest) => latest.step == *step,
            Err(CheckpointError::Nothing { .. }) => false,
            // Who knows.
            Err(_) => true,
        };
        if !newest && store.steps().is_ok_and(|steps| steps.contains(step)) {
            let _ = store.retire(&[*step]);
        }
    }

    fn exchange(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        manifest.check()?;
        let Draft { store: Store { disk, dir: parent }, step, dir, .. } = self;
        let (text, path) = (manifest.to_text(), dir.join(MANIFEST));
        if text.len() as u64 > MANIFEST_MOST {
            return Err(CheckpointError::TooLarge { path, most: MANIFEST_MOST, found: text.len() as u64 });
        }
        write(&**disk, &path, text.as_bytes())?;
        disk.sync_dir(dir).map_err(io("syncing", dir))?;
        let saved = parent.join(name(SAVED, *step));
        disk.rename(dir, &saved).map_err(io("renaming", dir))?;
        disk.sync_dir(parent).map_err(io("syncing", parent))?;
        self.store.announce(*step, &blake3::hash(text.as_bytes()).to_hex())
    }
}

/// A small file, synced.
fn write(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let mut file = disk.create(path).map_err(io("creating", path))?;
    file.write_at(0, bytes).map_err(io("writing", path))?;
    file.sync().map_err(io("syncing", path))
}

/// Steps sort as their names do.
fn name(prefix: &str, step: u64) -> String {
    format!("{prefix}{step:012}")
}

fn step_of(prefix: &str, other: &str) -> Option<u64> {
    let step = other.strip_prefix(prefix)?.parse().ok()?;
    (name(prefix, step) == other).then_some(step)
}
