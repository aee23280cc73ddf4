//! Folder of checkpoints: a step becomes the newest one in a single atomic exchange.
//!
//! ```text
//! dir/LOCK                     held while one job saves here
//! dir/tmp-000000000400/..      a step that is being saved; removed by the next holder of the lock
//! dir/step-000000000400/..     a complete step: files, and manifest.json
//! dir/LATEST                   {"step", "manifest": "<BLAKE3 of manifest.json>"}
//! ```
//!
//! The files are synced first, then the manifest, then their folder. A rename gives the folder its final name, and its parent is synced
//! before LATEST is exchanged in the same way. LATEST names a complete step after a crash at any point.

pub(crate) mod direct_io;
pub(crate) mod disk;
pub(crate) mod found;
pub(crate) mod reader;
pub(crate) mod shard_file;
pub(crate) mod tensor_reader;
pub(crate) mod verify;

use crate::error::{CheckpointError, io};
use crate::format::manifest::Manifest;
use crate::store::disk::{Disk, Os};
use crate::store::reader::{Saved, read_all};
use crate::store::shard_file::{ShardWriter, Vector};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const LOCK: &str = "LOCK";
const LATEST: &str = "LATEST";
const NEXT: &str = "LATEST.tmp";
pub(crate) const MANIFEST: &str = "manifest.json";
const PROOF: &str = "proof";
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
}

/// Folder of checkpoints.
#[derive(Clone, Debug)]
pub struct Store {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
}

/// Folder of a step that is being saved, as any rank sees it.
#[derive(Clone, Debug)]
pub struct Folder {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
}

/// Step that is being saved; it holds the store's lock. Dropping it leaves a folder that the next save removes.
///
/// ```
/// use meshstep_checkpoint::{Disk, Draft, Folder, Manifest, Os, Reader, ShardWriter, Store, Type, Vector, Writer};
///
/// # let dir = std::env::temp_dir().join(format!("meshstep-draft-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&dir)?;
/// let store = Store::on(std::sync::Arc::new(Os), &dir);
/// let draft: Draft = store.begin(7)?;
/// let folder: Folder = draft.folder(); // other ranks write their files there
/// let vectors = [Vector { key: "loader".to_owned(), dtype: Type::U8, shape: vec![4] }];
/// let mut file: ShardWriter = folder.file(0, "rank-0.safetensors", &vectors)?;
/// file.begin();
/// file.write(b"4711")?;
/// let (entry, stored) = file.finish()?;
/// let manifest = Manifest {
///     format: meshstep_checkpoint::FORMAT,
///     step: 7,
///     mesh: "ranks=1".to_owned(),
///     files: vec![entry],
///     tensors: [].into(),
///     settings: [].into(),
///     blobs: [("loader".to_owned(), stored[0].clone())].into(),
/// };
/// draft.publish(&manifest)?; // a step is visible whole or not at all
/// assert_eq!(store.latest()?.blob("loader")?.as_deref(), Some(&b"4711"[..]));
///
/// // Any storage with files is a disk.
/// let mut scratch: Box<dyn Writer> = Os.create(&dir.join("scratch"))?;
/// scratch.write_at(0, b"abc")?;
/// scratch.sync()?;
/// let scratch: Box<dyn Reader> = Os.open(&dir.join("scratch"))?;
/// assert_eq!(scratch.len()?, 3);
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Draft {
    store: Store,
    step: u64,
    dir: PathBuf,
    /// Released when the draft is dropped.
    _lock: Box<dyn Debug + Send + Sync>,
}

impl Store {
    /// Opens the checkpoints in `dir`, which must exist.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self::on(Arc::new(Os), dir)
    }

    /// Same as [`new`](Self::new) on another disk.
    pub fn on(disk: Arc<dyn Disk>, dir: impl Into<PathBuf>) -> Self {
        Store { disk, dir: dir.into() }
    }

    /// Returns the saved steps in ascending order.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let mut steps: Vec<u64> = self.names()?.iter().filter_map(|name| step_of(SAVED, name)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Opens the newest complete step.
    pub fn latest(&self) -> Result<Saved, CheckpointError> {
        let Latest { step, manifest } = self.announced()?;
        Saved::open(Arc::clone(&self.disk), &self.dir.join(name(SAVED, step)), Some(&manifest))
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
        let _lock = self.lock()?;
        self.announce(step, self.open(step)?.hash())
    }

    /// Begins to save `step`, which must come after the newest step, and removes the remains of earlier attempts. Returns an error if
    /// LATEST cannot be trusted.
    pub fn begin(&self, step: u64) -> Result<Draft, CheckpointError> {
        let lock = self.lock()?;
        match self.latest().map(|latest| latest.step()) {
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
        // The step never became the newest; a job that resumed from an earlier step saves it again.
        if names.iter().any(|name| step_of(SAVED, name) == Some(step)) {
            self.retire(&[step])?;
        }
        let dir = self.dir.join(name(DRAFT, step));
        self.disk.create_dir(&dir).map_err(io("creating", &dir))?;
        Ok(Draft { store: self.clone(), step, dir, _lock: lock })
    }

    /// Returns the folder in which `step` is being saved, by this or another rank.
    pub fn folder(&self, step: u64) -> Folder {
        Folder { disk: Arc::clone(&self.disk), dir: self.dir.join(name(DRAFT, step)) }
    }

    /// Removes all but the newest `keep` of the steps up to the one that LATEST names, which always stays.
    pub fn keep(&self, keep: usize) -> Result<(), CheckpointError> {
        let _lock = self.lock()?;
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

    fn lock(&self) -> Result<Box<dyn Debug + Send + Sync>, CheckpointError> {
        let path = self.dir.join(LOCK);
        let lock = self.disk.lock(&path).map_err(io("locking", &path))?;
        lock.ok_or_else(|| CheckpointError::Locked { dir: self.dir.clone() })
    }

    /// Exchanges LATEST.
    fn announce(&self, step: u64, manifest: &str) -> Result<(), CheckpointError> {
        let (next, latest) = (self.dir.join(NEXT), Latest { step, manifest: manifest.to_owned() });
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

impl Folder {
    /// Begins file `index` with a header for `vectors`.
    pub fn file(&self, index: usize, file: &str, vectors: &[Vector]) -> Result<ShardWriter, CheckpointError> {
        let path = self.dir.join(file);
        ShardWriter::new(self.disk.create(&path).map_err(io("creating", &path))?, &path, index, vectors)
    }

    /// Syncs the names of the files in the folder.
    pub fn sync(&self) -> Result<(), CheckpointError> {
        self.disk.sync_dir(&self.dir).map_err(io("syncing", &self.dir))
    }

    /// Writes `proof` to the folder, for other ranks to read.
    pub fn show(&self, proof: u64) -> Result<(), CheckpointError> {
        write(&*self.disk, &self.dir.join(PROOF), &proof.to_le_bytes())
    }

    /// Checks that this is the folder to which `proof` was written.
    pub fn shows(&self, proof: u64) -> Result<(), CheckpointError> {
        let elsewhere = CheckpointError::Elsewhere { dir: self.dir.clone() };
        match read_all(&*self.disk, &self.dir.join(PROOF), 8) {
            Ok(found) if found == proof.to_le_bytes() => Ok(()),
            Ok(_) | Err(CheckpointError::Io { kind: std::io::ErrorKind::NotFound, .. }) => Err(elsewhere),
            Err(error) => Err(error),
        }
    }

    /// Removes the proof.
    pub fn hide(&self) -> Result<(), CheckpointError> {
        let path = self.dir.join(PROOF);
        self.disk.remove(&path).map_err(io("removing", &path))
    }
}

impl Draft {
    /// Returns the folder of the step.
    pub fn folder(&self) -> Folder {
        self.store.folder(self.step)
    }

    /// Begins file `index` with a header for `vectors`.
    pub fn file(&self, index: usize, file: &str, vectors: &[Vector]) -> Result<ShardWriter, CheckpointError> {
        self.folder().file(index, file, vectors)
    }

    /// Makes the step the newest one. Every file must be complete.
    pub fn publish(self, manifest: &Manifest) -> Result<(), CheckpointError> {
        self.complete(manifest)
    }

    /// Same as [`publish`](Self::publish), then removes all but the newest `keep` steps under the same lock. After an error in removing,
    /// the step is still the newest one.
    pub fn publish_keeping(self, manifest: &Manifest, keep: usize) -> Result<(), CheckpointError> {
        self.complete(manifest)?;
        self.store.keep_newest(keep)
    }

    /// Discards the step, as far as the disk allows; the next save removes the rest.
    pub fn discard(self) {
        self.remove();
    }

    fn remove(&self) {
        let _ = self.store.disk.remove(&self.dir);
    }

    fn complete(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        // A step that failed must not keep the disk full.
        self.exchange(manifest).inspect_err(|_| self.give_up())
    }

    /// Removes the step under either of its names, unless it has become the newest after all.
    fn give_up(&self) {
        self.remove();
        let Draft { store, step, .. } = self;
        let _ = store.disk.remove(&store.dir.join(NEXT));
        let newest = match store.announced() {
            Ok(latest) => latest.step == *step,
            Err(CheckpointError::Nothing { .. }) => false,
            // LATEST cannot be read and may name this step.
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
