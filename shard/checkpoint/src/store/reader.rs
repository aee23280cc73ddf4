//! Complete step, opened for reading.

use super::disk::{Disk, Os, Reader};
use super::{MANIFEST, MANIFEST_MOST};
use crate::error::{CheckpointError, io};
use crate::format::catalog::{Catalog, StoredRef};
use crate::format::hashes;
use crate::format::manifest::{Manifest, Stored, WINDOW};
use crate::format::run_id::RunId;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use twox_hash::XxHash3_64;

/// Complete step. A file of it is opened when something is read from it.
#[derive(Debug)]
pub struct Saved {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    catalog: Catalog,
    hash: String,
    /// Manifest, once it was asked for.
    manifest: OnceLock<Manifest>,
}

/// File of a complete step, of the length that the manifest gives.
#[derive(Debug)]
pub struct SavedFile {
    file: Box<dyn Reader>,
    /// True if no other rank reads the same bytes soon.
    once: bool,
    path: PathBuf,
}

impl Saved {
    /// Opens the step in `dir`, which need not be a store's folder and may be named by a link. Without LATEST, only the manifest's own hash
    /// vouches for the manifest.
    pub fn at(dir: &Path) -> Result<Self, CheckpointError> {
        Self::read(Arc::new(Os), dir, None)
    }

    /// Opens the step in `dir` of a store. The manifest must have hash `hash`, if that is known.
    pub(crate) fn open(disk: Arc<dyn Disk>, dir: &Path, hash: Option<&str>) -> Result<Self, CheckpointError> {
        refuse_link(&*disk, dir)?;
        Self::read(disk, dir, hash)
    }

    fn read(disk: Arc<dyn Disk>, dir: &Path, hash: Option<&str>) -> Result<Self, CheckpointError> {
        let (catalog, hash) = read_catalog(&*disk, dir, hash)?;
        Ok(Self::of(disk, dir, catalog, hash))
    }

    /// Returns the step in `dir` that this or another rank has read.
    pub(crate) fn of(disk: Arc<dyn Disk>, dir: &Path, catalog: Catalog, hash: String) -> Self {
        Saved { disk, dir: dir.to_owned(), catalog, hash, manifest: OnceLock::new() }
    }

    /// Returns the step's number of steps, without [`manifest`](Self::manifest).
    pub fn step(&self) -> u64 {
        self.catalog.step()
    }

    /// Returns the run that the step belongs to, without [`manifest`](Self::manifest); `None` if an earlier version saved it.
    pub fn run(&self) -> Option<RunId> {
        self.catalog.run()
    }

    /// Returns the contents as ranks hold them.
    pub(crate) fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Returns the manifest. The first call makes it, which takes memory for a few times the file's length; nothing else here needs it.
    pub fn manifest(&self) -> &Manifest {
        self.manifest.get_or_init(|| self.catalog.unpack())
    }

    /// Returns the manifest's BLAKE3 hash in hexadecimal digits: two steps with the same hash are the same.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Returns the caller's bytes of this name after checking their hashes; `None` if the step has no such blob.
    pub fn blob(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        let Some(stored) = self.catalog.blob(name) else { return Ok(None) };
        let mut bytes = Vec::new();
        let mut room = vec![0; WINDOW.min(stored.bytes) as usize];
        let what = format!("blob {name:?}");
        let file = self.file(stored.file).map_err(|error| unreadable(&what, error))?;
        file.read_part(&stored, (0, stored.bytes), &mut room, &what, |_, part| {
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        Ok(Some(bytes))
    }

    /// Returns the bytes that rank `rank` of the saving ranks passed as `name`.
    pub fn blob_of(&self, name: &str, rank: usize) -> Result<Option<Vec<u8>>, CheckpointError> {
        self.blob(&of_rank(name, rank))
    }

    /// Returns the folder of the step.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Opens file `index` of the manifest; returns [`Gone`](CheckpointError::Gone) if the step has been removed meanwhile. Files that were
    /// opened before stay readable.
    ///
    /// # Panics
    /// If the manifest has no file `index`.
    pub fn file(&self, index: usize) -> Result<SavedFile, CheckpointError> {
        let file = self.catalog.file(index);
        assert!(file.is_some(), "the manifest has a file {index}");
        let (name, bytes, _) = file.unwrap_or_default();
        let path = self.dir.join(name);
        let file = self.disk.open(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound if self.is_gone() => CheckpointError::Gone { path: self.dir.clone() },
            _ => io("opening", &path)(error),
        })?;
        let found = file.len().map_err(io("measuring", &path))?;
        match found == bytes {
            true => Ok(SavedFile { file, once: false, path }),
            false => Err(CheckpointError::Size { path, expected: bytes, found }),
        }
    }

    /// Returns true if the whole step is gone, rather than one file of it.
    fn is_gone(&self) -> bool {
        let manifest = self.disk.open(&self.dir.join(MANIFEST));
        manifest.is_err_and(|error| error.kind() == ErrorKind::NotFound)
    }
}

/// Checks that a step's folder is no link.
pub(crate) fn refuse_link(disk: &dyn Disk, dir: &Path) -> Result<(), CheckpointError> {
    match disk.is_link(dir) {
        Ok(true) => Err(CheckpointError::Link { path: dir.to_owned() }),
        // Reading the manifest returns `Gone` for a missing folder.
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io("opening", dir)(error)),
        _ => Ok(()),
    }
}

/// Reads and checks the manifest in `dir`; returns its contents and its hash, which must be `hash`, if that is known.
pub(crate) fn read_catalog(
    disk: &dyn Disk,
    dir: &Path,
    hash: Option<&str>,
) -> Result<(Catalog, String), CheckpointError> {
    let path = dir.join(MANIFEST);
    let text = read_all(disk, &path, MANIFEST_MOST).map_err(gone)?;
    let found = blake3::hash(&text).to_hex().to_string();
    match hash {
        Some(expected) if expected != found => {
            let (what, expected) = ("all bytes".to_owned(), expected.to_owned());
            Err(CheckpointError::Hash { path, what, expected, found })
        }
        _ => {
            let catalog = Catalog::from_text(&path, text)?;
            check_name(dir, catalog.step())?;
            Ok((catalog, found))
        }
    }
}

/// Says that a step is gone whose manifest was not found.
pub(crate) fn gone(error: CheckpointError) -> CheckpointError {
    match error {
        CheckpointError::Io { kind: ErrorKind::NotFound, path, .. } => CheckpointError::Gone { path },
        error => error,
    }
}

/// Checks that a folder with a step's name has the name of this step.
fn check_name(dir: &Path, step: u64) -> Result<(), CheckpointError> {
    let name = dir.file_name().and_then(|name| name.to_str());
    let named = name.and_then(|name| name.strip_prefix("step-")?.parse().ok());
    match named.is_none_or(|named: u64| named == step) {
        true => Ok(()),
        false => Err(CheckpointError::Renamed { path: dir.to_owned(), step }),
    }
}

impl SavedFile {
    /// Passes bytes `from` to `to` of `stored` to `take` with their offset, as many windows at a time as `room` holds. Each window that
    /// contains such bytes is read and checked as a whole first. `what` names the bytes in errors.
    ///
    /// # Panics
    /// If `room` is shorter than both a window and `stored`, or `to` lies behind the end of `stored`.
    pub fn read(
        &self,
        stored: &Stored,
        (from, to): (u64, u64),
        room: &mut [u8],
        what: &str,
        take: impl FnMut(u64, &[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        self.read_part(&stored.into(), (from, to), room, what, take)
    }

    /// Same as [`read`](Self::read) for bytes of a catalog.
    pub(crate) fn read_part(
        &self,
        stored: &StoredRef<'_>,
        (from, to): (u64, u64),
        room: &mut [u8],
        what: &str,
        mut take: impl FnMut(u64, &[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        assert!(to <= stored.bytes, "byte {to} is not stored: there are {}", stored.bytes);
        let most = (room.len() as u64 / WINDOW).max(1) * WINDOW;
        let mut start = if from < to { from / WINDOW * WINDOW } else { to };
        while start < to {
            let end = to.next_multiple_of(WINDOW).min(start + most).min(stored.bytes);
            let (at, len) = (stored.at + start, (end - start) as usize);
            let bytes = match self.once {
                true => self.file.read_once_at(at, len, room),
                false => self.file.read_at(at, &mut room[..len]).map(|()| &room[..len]),
            };
            let bytes = bytes.map_err(|error| unreadable(what, self.failed(error)))?;
            self.check(stored, start, bytes, what)?;
            let (first, last) = (from.max(start), to.min(end));
            take(first, &bytes[(first - start) as usize..(last - start) as usize])?;
            start = end;
        }
        Ok(())
    }

    /// Sets whether this rank is the only one to read the same bytes soon.
    pub(crate) fn once(self, once: bool) -> Self {
        SavedFile { once, ..self }
    }

    /// Fills `room` with the window that begins at byte `start` of `stored`, and checks it.
    pub(crate) fn window(
        &self,
        stored: &StoredRef<'_>,
        start: u64,
        room: &mut [u8],
        what: &str,
    ) -> Result<(), CheckpointError> {
        self.fill(stored.at + start, room).map_err(|error| unreadable(what, error))?;
        self.check(stored, start, room, what)
    }

    /// Checks the hashes of `bytes`, the windows from byte `start` of `stored` on.
    fn check(
        &self,
        stored: &StoredRef<'_>,
        start: u64,
        bytes: &[u8],
        what: &str,
    ) -> Result<(), CheckpointError> {
        for (start, window) in (start..).step_by(WINDOW as usize).zip(bytes.chunks(WINDOW as usize)) {
            // A manifest with too few hashes is refused when it is read.
            let expected = stored.hashes.get((start / WINDOW) as usize).unwrap_or_default();
            let found = XxHash3_64::oneshot(window);
            if expected != found {
                let what = format!("bytes {start} to {} of {what}", start + window.len() as u64);
                let (path, [expected, found]) = (self.path.clone(), [expected, found].map(hashes::text));
                return Err(CheckpointError::Hash { path, what, expected, found });
            }
        }
        Ok(())
    }

    fn failed(&self, error: std::io::Error) -> CheckpointError {
        match error.kind() {
            // The file lies on a network file system and was removed after it was opened.
            ErrorKind::StaleNetworkFileHandle => CheckpointError::Gone { path: self.path.clone() },
            _ => io("reading", &self.path)(error),
        }
    }
}

/// Adds the name of the affected bytes to an error, unless the error has it already or the whole step is gone.
pub(crate) fn unreadable(what: &str, error: CheckpointError) -> CheckpointError {
    match error {
        CheckpointError::Hash { .. } | CheckpointError::Gone { .. } | CheckpointError::Unreadable { .. } => {
            error
        }
        source => CheckpointError::Unreadable { what: what.to_string(), source: Box::new(source) },
    }
}

/// Returns the name under which a rank's own bytes are saved.
pub(crate) fn of_rank(name: &str, rank: usize) -> String {
    format!("{name}@{rank}")
}

/// Reads a whole file of at most `most` bytes.
pub(crate) fn read_all(disk: &dyn Disk, path: &Path, most: u64) -> Result<Vec<u8>, CheckpointError> {
    let file = disk.open(path).map_err(io("opening", path))?;
    let len = file.len().map_err(io("measuring", path))?;
    if len > most {
        return Err(CheckpointError::TooLarge { path: path.to_owned(), most, found: len });
    }
    let mut bytes = vec![0; len as usize];
    file.read_at(0, &mut bytes).map_err(io("reading", path))?;
    Ok(bytes)
}

impl SavedFile {
    /// Fills `room` with the bytes at offset `at`, without a check.
    pub(crate) fn fill(&self, at: u64, room: &mut [u8]) -> Result<(), CheckpointError> {
        self.file.read_at(at, room).map_err(|error| self.failed(error))
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}
