//! A disk in memory that keeps, in a crash, what was synced, and of everything else some of it in any order.

use meshstep_shard::checkpoint::{Disk, Reader, Writer};
use rand::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Everything that happened, from the beginning on.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Create { path: PathBuf, file: usize },
    CreateDir { path: PathBuf },
    Write { file: usize, at: u64, bytes: Vec<u8> },
    SyncFile { file: usize },
    SyncDir { dir: PathBuf },
    Rename { from: PathBuf, to: PathBuf },
    Remove { path: PathBuf },
}

/// What a name stands for: a file, or a folder.
type Names = BTreeMap<PathBuf, Option<usize>>;

#[derive(Debug, Default)]
struct State {
    names: Names,
    files: HashMap<usize, Vec<u8>>,
    events: Vec<Event>,
    next: usize,
    /// Before the event of this number everything begins to fail.
    fails_at: Option<usize>,
    held: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Sim(Arc<Mutex<State>>);

impl State {
    fn apply(&mut self, event: &Event) {
        match event {
            Event::Create { path, file } => {
                self.names.insert(path.clone(), Some(*file));
                self.files.entry(*file).or_default();
                self.next = self.next.max(file + 1);
            }
            Event::CreateDir { path } => {
                self.names.insert(path.clone(), None);
            }
            Event::Write { file, at, bytes } => {
                let all = self.files.entry(*file).or_default();
                let end = *at as usize + bytes.len();
                all.resize(all.len().max(end), 0);
                all[*at as usize..end].copy_from_slice(bytes);
            }
            Event::SyncFile { .. } | Event::SyncDir { .. } => {}
            Event::Rename { from, to } => {
                // What lies in a folder goes with it.
                let moved: Vec<PathBuf> =
                    self.names.keys().filter(|path| path.starts_with(from)).cloned().collect();
                for path in moved {
                    let what = self.names.remove(&path).unwrap();
                    let rest = path.strip_prefix(from).unwrap();
                    let path = if rest.as_os_str().is_empty() { to.clone() } else { to.join(rest) };
                    self.names.insert(path, what);
                }
            }
            Event::Remove { path } => self.names.retain(|other, _| !other.starts_with(path)),
        }
    }
}

impl Sim {
    /// An empty disk with one folder.
    pub(crate) fn new(dir: &str) -> Self {
        let sim = Sim::default();
        sim.state().names.insert(dir.into(), None);
        sim
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn events(&self) -> usize {
        self.state().events.len()
    }

    /// Before the event of this number everything begins to fail.
    pub(crate) fn fail_at(&self, event: usize) {
        self.state().fails_at = Some(event);
    }

    /// Bytes of a file, to damage.
    pub(crate) fn damage(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state();
        let file = state.names[path].unwrap();
        change(state.files.get_mut(&file).unwrap());
    }

    /// All of a file.
    pub(crate) fn bytes(&self, path: &Path) -> Vec<u8> {
        let state = self.state();
        state.files[&state.names[path].unwrap()].clone()
    }

    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let state = self.state();
        state.names.iter().filter(|(_, file)| file.is_some()).map(|(path, _)| path.clone()).collect()
    }

    pub(crate) fn forget(&self, path: &Path) {
        self.state().names.remove(path).unwrap();
    }

    /// The disk after a crash before event `count`: `random` decides what of everything that was not synced is there.
    pub(crate) fn crashed(&self, dir: &str, count: usize, random: &mut StdRng) -> Sim {
        let after = Sim::new(dir);
        let events = &self.state().events[..count].to_vec();
        let keep = random.random_range(0.0..1.0);
        {
            let mut state = after.state();
            for (i, event) in events.iter().enumerate() {
                let later = &events[i + 1..];
                // Names are kept by a later sync of the folder they are in, bytes by one of their file.
                let synced_dir = |path: &Path| {
                    let dir = path.parent().unwrap();
                    later.iter().any(|e| matches!(e, Event::SyncDir { dir: synced } if synced == dir))
                };
                let kept = match event {
                    Event::Create { path, .. } | Event::CreateDir { path } | Event::Remove { path } => {
                        synced_dir(path)
                    }
                    Event::Rename { from, .. } => synced_dir(from),
                    Event::Write { file, .. } => {
                        later.iter().any(|e| matches!(e, Event::SyncFile { file: synced } if synced == file))
                    }
                    Event::SyncFile { .. } | Event::SyncDir { .. } => true,
                };
                if kept || random.random_bool(keep) {
                    // A name in a folder that has none is lost with it.
                    state.apply(event);
                } else if let Event::Write { file, at, bytes } = event {
                    // Some of a write may be there, and the length without the bytes.
                    let part = random.random_range(0..=bytes.len());
                    let torn = Event::Write { file: *file, at: *at, bytes: bytes[..part].to_vec() };
                    state.apply(&torn);
                }
            }
            state.next = self.state().next;
            let names = state.names.clone();
            let there = |path: &Path| path == Path::new(dir) || names.contains_key(path.parent().unwrap());
            state.names.retain(|path, _| there(path));
        }
        after
    }

    fn log(&self, event: Event) -> io::Result<()> {
        let mut state = self.state();
        if state.fails_at.is_some_and(|at| state.events.len() >= at) {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "no space left"));
        }
        state.apply(&event);
        state.events.push(event);
        Ok(())
    }

    fn find(&self, path: &Path) -> io::Result<Option<usize>> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, "no such name");
        self.state().names.get(path).copied().ok_or_else(missing)
    }

    /// A file's, that no other has, whoever creates one at the same time.
    fn number(&self) -> usize {
        let mut state = self.state();
        state.next += 1;
        state.next - 1
    }

    fn check_free(&self, path: &Path) -> io::Result<()> {
        let state = self.state();
        if state.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        match state.names.get(path.parent().unwrap()) {
            Some(None) => Ok(()),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl Disk for Sim {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Writer>> {
        self.check_free(path)?;
        let file = self.number();
        self.log(Event::Create { path: path.to_owned(), file })?;
        Ok(Box::new(SimFile { sim: self.clone(), file }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Reader>> {
        let file = self.find(path)?.ok_or(io::ErrorKind::IsADirectory)?;
        Ok(Box::new(SimFile { sim: self.clone(), file }))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.check_free(path)?;
        self.log(Event::CreateDir { path: path.to_owned() })
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<(String, bool)>> {
        self.find(dir)?;
        let state = self.state();
        let inside = state.names.iter().filter(|(path, _)| path.parent() == Some(dir));
        Ok(inside
            .map(|(path, file)| (path.file_name().unwrap().to_str().unwrap().to_owned(), file.is_none()))
            .collect())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.find(from)?;
        self.log(Event::Rename { from: from.to_owned(), to: to.to_owned() })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.find(path)?;
        self.log(Event::Remove { path: path.to_owned() })
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.find(dir)?;
        self.log(Event::SyncDir { dir: dir.to_owned() })
    }

    fn lock(&self, _: &Path) -> io::Result<Option<Box<dyn Debug + Send + Sync>>> {
        let free = !std::mem::replace(&mut self.state().held, true);
        Ok(free.then(|| Box::new(Held(self.clone())) as Box<dyn Debug + Send + Sync>))
    }
}

#[derive(Debug)]
struct Held(Sim);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.state().held = false;
    }
}

#[derive(Debug)]
struct SimFile {
    sim: Sim,
    file: usize,
}

impl Writer for SimFile {
    fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.sim.log(Event::Write { file: self.file, at, bytes: bytes.to_vec() })
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sim.log(Event::SyncFile { file: self.file })
    }
}

impl Reader for SimFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.sim.state().files[&self.file].len() as u64)
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let state = self.sim.state();
        let all = &state.files[&self.file];
        let found = all.get(offset as usize..).and_then(|rest| rest.get(..bytes.len()));
        bytes.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}
