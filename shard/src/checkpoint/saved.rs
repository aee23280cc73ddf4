//! A complete step, to read from.

use super::disk::{Disk, Os, Reader};
use super::error::{CheckpointError, io};
use super::manifest::{FileEntry, Manifest, Stored, WINDOW};
use super::store::{MANIFEST, MANIFEST_MOST};
use super::vectors::unreadable;
use rayon::prelude::*;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// A complete step. Its files are opened when something is read from them.
#[derive(Debug)]
pub struct Saved {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    manifest: Manifest,
}

/// One of its files, of the size the manifest says.
#[derive(Debug)]
pub struct SavedFile {
    file: Box<dyn Reader>,
    path: PathBuf,
}

impl Saved {
    /// The step in `dir`, wherever that is: without LATEST nothing vouches for its manifest but the manifest.
    pub fn at(dir: &Path) -> Result<Self, CheckpointError> {
        Self::open(Arc::new(Os), dir, None)
    }

    /// The step in `dir`, whose manifest has this hash where one is known.
    pub(super) fn open(disk: Arc<dyn Disk>, dir: &Path, hash: Option<&str>) -> Result<Self, CheckpointError> {
        let path = dir.join(MANIFEST);
        let text = read_all(&*disk, &path, MANIFEST_MOST)?;
        let found = blake3::hash(&text).to_hex();
        match hash {
            Some(expected) if expected != found.as_str() => {
                let (what, expected) = ("all bytes".to_owned(), expected.to_owned());
                Err(CheckpointError::Hash { path, what, expected, found: found.to_string() })
            }
            _ => Ok(Saved { manifest: Manifest::from_text(&path, &text)?, disk, dir: dir.to_owned() }),
        }
    }

    /// What it holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// File `index` of the manifest.
    ///
    /// # Panics
    /// If there is none.
    pub fn file(&self, index: usize) -> Result<SavedFile, CheckpointError> {
        let FileEntry { name, bytes, .. } = &self.manifest.files[index];
        let path = self.dir.join(name);
        let file = self.disk.open(&path).map_err(io("opening", &path))?;
        let found = file.len().map_err(io("measuring", &path))?;
        match found == *bytes {
            true => Ok(SavedFile { file, path }),
            false => Err(CheckpointError::Size { path, expected: *bytes, found }),
        }
    }
}

impl SavedFile {
    /// Hands `take` the bytes from `from` to `to` of what is stored, a window or less at a time with its place, each window checked
    /// as a whole before. `room` is one window long or several, which are then read and checked at once, and kept by the caller;
    /// `what` names the bytes in errors.
    ///
    /// # Panics
    /// If not so much is stored.
    pub fn read(
        &self,
        stored: &Stored,
        range: (u64, u64),
        room: &mut [u8],
        what: &str,
        take: impl FnMut(u64, &[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        self.read_to(stored, range, room, &what, take)
    }

    /// The same with errors of the caller's.
    pub(super) fn read_to<E: From<CheckpointError>>(
        &self,
        stored: &Stored,
        (from, to): (u64, u64),
        room: &mut [u8],
        what: &(dyn Display + Sync),
        mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        assert!(to <= stored.bytes, "bytes up to {to} of {}", stored.bytes);
        let most = room.len() as u64 / WINDOW * WINDOW;
        let mut start = from / WINDOW * WINDOW;
        while start < to {
            let end = to.next_multiple_of(WINDOW).min(stored.bytes).min(start + most);
            let windows = &mut room[..(end - start) as usize];
            self.fill_windows(stored, start / WINDOW, windows, what)?;
            for (window, start) in windows.chunks(WINDOW as usize).zip((start..).step_by(WINDOW as usize)) {
                let (first, last) = (from.max(start), to.min(start + window.len() as u64));
                take(first, &window[(first - start) as usize..(last - start) as usize])?;
            }
            start = end;
        }
        Ok(())
    }

    /// Fills `room` with windows from `first` on, each checked. Several at once, as the hash takes one core about as long as the page
    /// cache takes to give the bytes.
    fn fill_windows(
        &self,
        stored: &Stored,
        first: u64,
        room: &mut [u8],
        what: &(dyn Display + Sync),
    ) -> Result<(), CheckpointError> {
        let fill = |(at, window): (usize, &mut [u8])| {
            let index = first + at as u64;
            self.fill(stored.at + index * WINDOW, window).map_err(|error| unreadable(what, error))?;
            self.check_window(stored, index, window, what)
        };
        if room.len() as u64 <= WINDOW {
            return fill((0, room));
        }
        let filled: Vec<_> = room.par_chunks_mut(WINDOW as usize).enumerate().map(fill).collect();
        // The first one's error, whichever came first.
        filled.into_iter().collect()
    }

    /// Fills `room` with what is at `at`.
    pub(super) fn fill(&self, at: u64, room: &mut [u8]) -> Result<(), CheckpointError> {
        self.file.read_at(at, room).map_err(io("reading", &self.path))
    }

    /// Whether these bytes are window `index` of what is stored.
    pub(super) fn check_window(
        &self,
        stored: &Stored,
        index: u64,
        window: &[u8],
        what: &(dyn Display + Sync),
    ) -> Result<(), CheckpointError> {
        let (expected, found) = (&stored.xxh3[index as usize], format!("{:016x}", xxh3_64(window)));
        if *expected == found {
            return Ok(());
        }
        let start = index * WINDOW;
        let what = format!("bytes {start} to {} of {what}", start + window.len() as u64);
        Err(CheckpointError::Hash { path: self.path.clone(), what, expected: expected.clone(), found })
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
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
