//! Step that is being saved: its folder as every rank sees it, and its draft on rank 0, which makes it the newest step.

use super::disk::Disk;
use super::job_lock::Busy;
use super::reader::read_all;
use super::shard_file::{ShardWriter, Vector};
use super::{MANIFEST, MANIFEST_MOST, NEXT, SAVED, Store, contradiction, name, write};
use crate::error::{CheckpointError, io};
use crate::format::manifest::Manifest;
use crate::format::run_id::RunId;
use std::path::PathBuf;
use std::sync::Arc;

/// File by which ranks compare folders.
const PROOF: &str = "proof";

/// Folder of a step that is being saved, as any rank sees it.
#[derive(Clone, Debug)]
pub struct Folder {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) dir: PathBuf,
}

/// Step that is being saved; it is the only one of its store. Dropping it leaves a folder that the next save removes.
///
/// ```
/// use meshstep_checkpoint::{Disk, Draft, Folder, LockedFile, Manifest, Os, Reader, ShardWriter, Store, Type, Vector, Writer};
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
///     run: Some(draft.run()),
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
/// let mut locked: Box<dyn LockedFile> = Os.lock(&dir.join("scratch"))?.ok_or("it is locked")?;
/// locked.write(b"by this process")?;
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Draft {
    pub(super) store: Store,
    pub(super) step: u64,
    pub(super) dir: PathBuf,
    pub(super) run: RunId,
    pub(super) _busy: Busy,
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

    /// Returns the run that the step belongs to.
    pub fn run(&self) -> RunId {
        self.run
    }

    /// Makes the step the newest one. Every file must be complete, and the manifest of this run.
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
        if manifest.run != Some(self.run) {
            return Err(contradiction("the manifest", manifest.run, Some(self.run)));
        }
        let Draft { store: Store { disk, dir: parent, .. }, step, dir, .. } = self;
        let (text, path) = (manifest.to_text(), dir.join(MANIFEST));
        if text.len() as u64 > MANIFEST_MOST {
            return Err(CheckpointError::TooLarge { path, most: MANIFEST_MOST, found: text.len() as u64 });
        }
        write(&**disk, &path, text.as_bytes())?;
        disk.sync_dir(dir).map_err(io("syncing", dir))?;
        let saved = parent.join(name(SAVED, *step));
        disk.rename(dir, &saved).map_err(io("renaming", dir))?;
        disk.sync_dir(parent).map_err(io("syncing", parent))?;
        self.store.announce(*step, &blake3::hash(text.as_bytes()).to_hex(), manifest.run)
    }
}
