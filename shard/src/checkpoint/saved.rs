//! A complete step, to read from.

use super::disk::{Disk, Os, Reader};
use super::error::{CheckpointError, io};
use super::manifest::{FileEntry, Manifest, Stored, WINDOW};
use super::store::{MANIFEST, MANIFEST_MOST};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// A complete step. Its files are opened when something is read from them.
#[derive(Debug)]
pub struct Saved {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    manifest: Manifest,
    hash: String,
}

/// One of its files, of the size the manifest says.
#[derive(Debug)]
pub struct SavedFile {
    file: Box<dyn Reader>,
    /// Whether nobody else is about to read the same bytes.
    once: bool,
    path: PathBuf,
}

impl Saved {
    /// The step in `dir`, wherever that is: without LATEST nothing vouches for its manifest but the manifest. The caller may name it
    /// by a link.
    pub fn at(dir: &Path) -> Result<Self, CheckpointError> {
        Self::read(Arc::new(Os), dir, None)
    }

    /// The step in `dir` of a store, whose manifest has this hash where one is known.
    pub(super) fn open(disk: Arc<dyn Disk>, dir: &Path, hash: Option<&str>) -> Result<Self, CheckpointError> {
        match disk.is_link(dir) {
            Ok(true) => Err(CheckpointError::Link { path: dir.to_owned() }),
            // What is not there is told by name below.
            Err(error) if error.kind() != ErrorKind::NotFound => Err(io("opening", dir)(error)),
            _ => Self::read(disk, dir, hash),
        }
    }

    fn read(disk: Arc<dyn Disk>, dir: &Path, hash: Option<&str>) -> Result<Self, CheckpointError> {
        let path = dir.join(MANIFEST);
        let text = read_all(&*disk, &path, MANIFEST_MOST).map_err(|error| match error {
            CheckpointError::Io { kind: ErrorKind::NotFound, path, .. } => CheckpointError::Gone { path },
            error => error,
        })?;
        let found = blake3::hash(&text).to_hex();
        match hash {
            Some(expected) if expected != found.as_str() => {
                let (what, expected) = ("all bytes".to_owned(), expected.to_owned());
                Err(CheckpointError::Hash { path, what, expected, found: found.to_string() })
            }
            _ => {
                let manifest = Manifest::from_text(&path, &text)?;
                check_name(dir, manifest.step)?;
                Ok(Saved { manifest, disk, dir: dir.to_owned(), hash: found.to_string() })
            }
        }
    }

    /// What it holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The manifest's BLAKE3 hash, in hexadecimal digits: two steps with one hash are the same.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// The caller's bytes of this name, checked; `None` where there are none.
    pub fn blob(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        let Some(stored) = self.manifest.blobs.get(name) else { return Ok(None) };
        let mut bytes = Vec::new();
        let mut room = vec![0; WINDOW.min(stored.bytes) as usize];
        let what = format!("blob {name:?}");
        let file = self.file(stored.file).map_err(|error| unreadable(&what, error))?;
        file.read(stored, (0, stored.bytes), &mut room, &what, |_, part| {
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        Ok(Some(bytes))
    }

    /// The bytes that rank `rank` of those that saved gave as `name`.
    pub fn blob_of(&self, name: &str, rank: usize) -> Result<Option<Vec<u8>>, CheckpointError> {
        self.blob(&of_rank(name, rank))
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// File `index` of the manifest; an error of [`Gone`](CheckpointError::Gone) where the step has been removed meanwhile. Files that
    /// were opened before can be read on.
    ///
    /// # Panics
    /// If there is none.
    pub fn file(&self, index: usize) -> Result<SavedFile, CheckpointError> {
        let FileEntry { name, bytes, .. } = &self.manifest.files[index];
        let path = self.dir.join(name);
        let file = self.disk.open(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound if self.is_gone() => CheckpointError::Gone { path: self.dir.clone() },
            _ => io("opening", &path)(error),
        })?;
        let found = file.len().map_err(io("measuring", &path))?;
        match found == *bytes {
            true => Ok(SavedFile { file, once: false, path }),
            false => Err(CheckpointError::Size { path, expected: *bytes, found }),
        }
    }

    /// Whether all of it is no longer there, rather than a file of it.
    fn is_gone(&self) -> bool {
        let manifest = self.disk.open(&self.dir.join(MANIFEST));
        manifest.is_err_and(|error| error.kind() == ErrorKind::NotFound)
    }
}

/// Whether a folder that is called as a step is has the name of this one.
fn check_name(dir: &Path, step: u64) -> Result<(), CheckpointError> {
    let name = dir.file_name().and_then(|name| name.to_str());
    let named = name.and_then(|name| name.strip_prefix("step-")?.parse().ok());
    match named.is_none_or(|named: u64| named == step) {
        true => Ok(()),
        false => Err(CheckpointError::Renamed { path: dir.to_owned(), step }),
    }
}

impl SavedFile {
    /// Hands `take` the bytes from `from` to `to` of what is stored, as many at a time as `room` has windows for and with their place,
    /// each window they are of checked as a whole before. `what` names the bytes in errors.
    ///
    /// # Panics
    /// If `room` is shorter than a window and what is stored, or `to` lies behind that.
    pub fn read(
        &self,
        stored: &Stored,
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

    /// The same, for bytes that nobody else is about to read.
    pub(super) fn once(self, once: bool) -> Self {
        SavedFile { once, ..self }
    }

    /// Fills `room` with the window that begins at byte `start` of what is stored, all of it, and checks that.
    pub(super) fn window(
        &self,
        stored: &Stored,
        start: u64,
        room: &mut [u8],
        what: &str,
    ) -> Result<(), CheckpointError> {
        self.fill(stored.at + start, room).map_err(|error| unreadable(what, error))?;
        self.check(stored, start, room, what)
    }

    /// Whether the windows that begin at byte `start` of what is stored are `bytes`.
    fn check(&self, stored: &Stored, start: u64, bytes: &[u8], what: &str) -> Result<(), CheckpointError> {
        for (start, window) in (start..).step_by(WINDOW as usize).zip(bytes.chunks(WINDOW as usize)) {
            let expected = &stored.xxh3[(start / WINDOW) as usize];
            let found = format!("{:016x}", xxh3_64(window));
            if *expected != found {
                let what = format!("bytes {start} to {} of {what}", start + window.len() as u64);
                let (path, expected) = (self.path.clone(), expected.clone());
                return Err(CheckpointError::Hash { path, what, expected, found });
            }
        }
        Ok(())
    }

    fn failed(&self, error: std::io::Error) -> CheckpointError {
        match error.kind() {
            // A file of a network, removed after it was opened.
            ErrorKind::StaleNetworkFileHandle => CheckpointError::Gone { path: self.path.clone() },
            _ => io("reading", &self.path)(error),
        }
    }
}

/// The error with whose bytes it is about; damage says that itself, and a step that is gone is gone as a whole.
pub(super) fn unreadable(what: &str, error: CheckpointError) -> CheckpointError {
    match error {
        CheckpointError::Hash { .. } | CheckpointError::Gone { .. } | CheckpointError::Unreadable { .. } => {
            error
        }
        source => CheckpointError::Unreadable { what: what.to_string(), source: Box::new(source) },
    }
}

/// What the bytes of one rank are called.
pub(super) fn of_rank(name: &str, rank: usize) -> String {
    format!("{name}@{rank}")
}

/// All of a file with at most `most` bytes.
pub(super) fn read_all(disk: &dyn Disk, path: &Path, most: u64) -> Result<Vec<u8>, CheckpointError> {
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
    /// Fills `room` with what is at `at`, unchecked.
    pub(super) fn fill(&self, at: u64, room: &mut [u8]) -> Result<(), CheckpointError> {
        self.file.read_at(at, room).map_err(|error| self.failed(error))
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}
