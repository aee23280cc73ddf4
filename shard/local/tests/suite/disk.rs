//! Disk in memory, whose files a test can change, and which fails on request.

use meshstep_checkpoint::{Disk, LockedFile, Reader, Writer};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a file, shared with its readers and writers.
type Bytes = Arc<Mutex<Vec<u8>>>;

/// Files and folders by path; folders have no bytes. Clones share them.
#[derive(Clone, Debug)]
pub struct MemoryDisk(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    entries: BTreeMap<PathBuf, Option<Bytes>>,
    /// Number of changes so far.
    changes: usize,
    /// Number of the change before which everything begins to fail.
    fails_at: Option<usize>,
    held: bool,
}

#[derive(Debug)]
struct MemoryFile {
    disk: MemoryDisk,
    bytes: Bytes,
}

#[derive(Debug)]
struct Held(MemoryDisk);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemoryDisk {
    /// Makes an empty disk with one folder.
    pub fn new(dir: &str) -> Self {
        let entries = BTreeMap::from([(PathBuf::from(dir), None)]);
        MemoryDisk(Arc::new(Mutex::new(State { entries, ..State::default() })))
    }

    /// Lets everything fail from change number `change` on.
    pub fn fail_at(&self, change: usize) {
        locked(&self.0).fails_at = Some(change);
    }

    /// Changes the bytes of a file.
    pub fn damage(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        change(&mut locked(&self.bytes(path).unwrap()));
    }

    fn bytes(&self, path: &Path) -> io::Result<Bytes> {
        let state = locked(&self.0);
        let entry = state.entries.get(path).ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::clone(entry.as_ref().ok_or(io::ErrorKind::IsADirectory)?))
    }

    /// Counts a change, and makes it unless the disk fails.
    fn change<T>(&self, make: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        let mut state = locked(&self.0);
        if state.fails_at.is_some_and(|at| state.changes >= at) {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "no space left"));
        }
        state.changes += 1;
        make(&mut state)
    }

    fn make(&self, path: &Path, entry: Option<Bytes>) -> io::Result<()> {
        self.change(|state| match state.entries.contains_key(path) {
            true => Err(io::ErrorKind::AlreadyExists.into()),
            false => {
                state.entries.insert(path.to_owned(), entry);
                Ok(())
            }
        })
    }
}

impl Disk for MemoryDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Writer>> {
        let bytes = Bytes::default();
        self.make(path, Some(Arc::clone(&bytes)))?;
        Ok(Box::new(MemoryFile { disk: self.clone(), bytes }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Reader>> {
        Ok(Box::new(MemoryFile { disk: self.clone(), bytes: self.bytes(path)? }))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.make(path, None)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<(String, bool)>> {
        let state = locked(&self.0);
        state.entries.get(dir).ok_or(io::ErrorKind::NotFound)?;
        let inside = state.entries.iter().filter(|(path, _)| path.parent() == Some(dir));
        let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        Ok(inside.map(|(path, entry)| (name(path), entry.is_none())).collect())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change(|state| {
            state.entries.get(from).ok_or(io::ErrorKind::NotFound)?;
            let moved: Vec<_> = state.entries.extract_if(.., |path, _| path.starts_with(from)).collect();
            state.entries.retain(|path, _| !path.starts_with(to));
            let renamed = |(path, entry): (PathBuf, _)| {
                let rest = path.strip_prefix(from).unwrap();
                (if rest.as_os_str().is_empty() { to.to_owned() } else { to.join(rest) }, entry)
            };
            state.entries.extend(moved.into_iter().map(renamed));
            Ok(())
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.change(|state| {
            state.entries.get(path).ok_or(io::ErrorKind::NotFound)?;
            state.entries.retain(|other, _| !other.starts_with(path));
            Ok(())
        })
    }

    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        self.change(|_| Ok(()))
    }

    fn lock(&self, _: &Path) -> io::Result<Option<Box<dyn LockedFile>>> {
        let free = !std::mem::replace(&mut locked(&self.0).held, true);
        Ok(free.then(|| Box::new(Held(self.clone())) as Box<dyn LockedFile>))
    }
}

impl LockedFile for Held {
    fn write(&mut self, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn is_in_place(&self) -> io::Result<bool> {
        Ok(true)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        locked(&self.0.0).held = false;
    }
}

impl Writer for MemoryFile {
    fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.disk.change(|_| {
            let (mut all, at) = (locked(&self.bytes), at as usize);
            let end = all.len().max(at + bytes.len());
            all.resize(end, 0);
            all[at..at + bytes.len()].copy_from_slice(bytes);
            Ok(())
        })
    }

    fn sync(&mut self) -> io::Result<()> {
        self.disk.change(|_| Ok(()))
    }
}

impl Reader for MemoryFile {
    fn len(&self) -> io::Result<u64> {
        Ok(locked(&self.bytes).len() as u64)
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let all = locked(&self.bytes);
        let found = all.get(offset as usize..).and_then(|rest| rest.get(..bytes.len()));
        bytes.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}
