//! Disk in memory. A crash keeps everything that was synced, and a random part of everything else, in any order.

use meshstep_checkpoint::{Disk, LockedFile, Reader, Writer};
use rand::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// File or folder, independent of its name.
type Node = usize;

/// Root folder, which exists from the beginning.
const ROOT: Node = 0;

/// Name in a folder.
type Name = (Node, String);

/// Everything that happened. A folder's contents belong to the folder itself, under any of its names or without one.
#[derive(Clone, Debug)]
enum Event {
    Create {
        name: Name,
        node: Node,
        folder: bool,
    },
    Write {
        node: Node,
        at: u64,
        bytes: Vec<u8>,
    },
    /// Syncs the bytes of a file, or the names in a folder.
    Sync {
        node: Node,
    },
    Rename {
        from: Name,
        to: Name,
        node: Node,
    },
    Remove {
        name: Name,
    },
}

#[derive(Clone, Debug, Default)]
struct Tree {
    names: BTreeMap<Name, Node>,
    /// Bytes of files; folders have none.
    nodes: HashMap<Node, Option<Vec<u8>>>,
}

#[derive(Debug, Default)]
struct State {
    tree: Tree,
    /// State before the first event.
    before: Tree,
    events: Vec<Event>,
    /// Number of the event before which everything begins to fail.
    fails_at: Option<usize>,
    held: bool,
}

/// A disk in memory. Clones are the same disk.
#[derive(Clone, Debug)]
pub struct Sim {
    dir: PathBuf,
    state: Arc<Mutex<State>>,
}

impl Tree {
    fn apply(&mut self, event: &Event) {
        match event {
            Event::Create { name, node, folder } => {
                self.names.insert(name.clone(), *node);
                self.nodes.entry(*node).or_insert((!folder).then(Vec::new));
            }
            Event::Write { node, at, bytes } => {
                let all = self.nodes.entry(*node).or_default().get_or_insert_default();
                let at = *at as usize;
                if at > all.len() {
                    all.resize(at, 0);
                }
                // Bytes behind the end are appended in one copy; zeroing the room first would be slow, byte by byte.
                let (inside, behind) = bytes.split_at(bytes.len().min(all.len() - at));
                all[at..at + inside.len()].copy_from_slice(inside);
                all.extend_from_slice(behind);
            }
            Event::Sync { .. } => {}
            Event::Rename { from, to, node } => {
                if self.names.get(from) == Some(node) {
                    self.names.remove(from);
                }
                self.names.insert(to.clone(), *node);
            }
            Event::Remove { name } => drop(self.names.remove(name)),
        }
    }

    /// Returns the names in a folder.
    fn inside(&self, folder: Node) -> impl Iterator<Item = (&str, Node)> {
        let names = self.names.range((folder, String::new())..(folder + 1, String::new()));
        names.map(|((_, name), node)| (&**name, *node))
    }

    fn file(&self, node: Node) -> Option<&Vec<u8>> {
        self.nodes.get(&node).and_then(Option::as_ref)
    }
}

impl State {
    fn log(&mut self, event: Event) -> io::Result<()> {
        if self.fails_at.is_some_and(|at| self.events.len() >= at) {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "no space left"));
        }
        self.tree.apply(&event);
        self.events.push(event);
        Ok(())
    }
}

impl Sim {
    /// Makes an empty disk with one folder.
    pub fn new(dir: &str) -> Self {
        let tree = Tree { names: BTreeMap::new(), nodes: HashMap::from([(ROOT, None)]) };
        Sim::of(Path::new(dir), tree)
    }

    fn of(dir: &Path, tree: Tree) -> Self {
        let state = State { before: tree.clone(), tree, ..State::default() };
        Sim { dir: dir.to_owned(), state: Arc::new(Mutex::new(state)) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of events so far.
    pub fn events(&self) -> usize {
        self.state().events.len()
    }

    /// Lets everything fail from event number `event` on.
    pub fn fail_at(&self, event: usize) {
        self.state().fails_at = Some(event);
    }

    /// Changes the bytes of a file.
    pub fn damage(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        let node = self.find(path).unwrap();
        change(self.state().tree.nodes.get_mut(&node).unwrap().as_mut().unwrap());
    }

    /// Returns all bytes of a file.
    pub fn bytes(&self, path: &Path) -> Vec<u8> {
        let node = self.find(path).unwrap();
        self.state().tree.file(node).unwrap().clone()
    }

    /// Returns the paths of all files.
    pub fn files(&self) -> Vec<PathBuf> {
        let (state, mut files) = (self.state(), Vec::new());
        let mut folders = vec![(self.dir.clone(), ROOT)];
        while let Some((dir, folder)) = folders.pop() {
            for (name, node) in state.tree.inside(folder) {
                match state.tree.file(node) {
                    Some(_) => files.push(dir.join(name)),
                    None => folders.push((dir.join(name), node)),
                }
            }
        }
        files.sort();
        files
    }

    /// Removes a name at once, without an event.
    pub fn forget(&self, path: &Path) {
        let name = self.name(path).unwrap();
        self.state().tree.names.remove(&name).unwrap();
    }

    /// Returns the disk after a crash before event `count`; `random` decides which unsynced events survive.
    pub fn crashed(&self, count: usize, random: &mut StdRng) -> Sim {
        let state = self.state();
        let (events, mut tree) = (&state.events[..count], state.before.clone());
        let mut synced = HashMap::new();
        for (i, event) in events.iter().enumerate() {
            match event {
                Event::Create { node, folder, .. } => {
                    // The node may have its bytes and a later name without its first name.
                    tree.nodes.insert(*node, (!folder).then(Vec::new));
                }
                Event::Sync { node } => drop(synced.insert(*node, i)),
                _ => {}
            }
        }
        let keep = random.random_range(0.0..1.0);
        for (i, event) in events.iter().enumerate() {
            // A later sync of their folder keeps names, and one of their file keeps bytes.
            let of = match event {
                Event::Create { name: (folder, _), .. }
                | Event::Rename { from: (folder, _), .. }
                | Event::Remove { name: (folder, _) } => *folder,
                Event::Write { node, .. } | Event::Sync { node } => *node,
            };
            let kept = synced.get(&of).is_some_and(|last| *last > i) || random.random_bool(keep);
            match event {
                event if kept => tree.apply(event),
                // A part of a write may survive, and its length without all of its bytes.
                Event::Write { node, at, bytes } => {
                    let (mut torn, part) = (bytes.clone(), random.random_range(0..=bytes.len()));
                    match random.random_bool(0.5) {
                        true => torn[part..].fill(0),
                        false => torn.truncate(part),
                    }
                    tree.apply(&Event::Write { node: *node, at: *at, bytes: torn });
                }
                _ => {}
            }
        }
        Sim::of(&self.dir, tree)
    }

    fn log(&self, event: Event) -> io::Result<()> {
        self.state().log(event)
    }

    fn find(&self, path: &Path) -> io::Result<Node> {
        if path == self.dir {
            return Ok(ROOT);
        }
        let name = self.name(path)?;
        self.state().tree.names.get(&name).copied().ok_or_else(missing)
    }

    /// Returns a path's name in its folder, which must exist.
    fn name(&self, path: &Path) -> io::Result<Name> {
        let folder = self.find(path.parent().ok_or_else(missing)?)?;
        Ok((folder, path.file_name().ok_or_else(missing)?.to_str().unwrap().to_owned()))
    }

    fn make(&self, path: &Path, folder: bool) -> io::Result<SimFile> {
        let name = self.name(path)?;
        let mut state = self.state();
        if state.tree.names.contains_key(&name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        // Nodes are numbered in the order of events, so that the next number is free after a crash too.
        let node = state.tree.nodes.len();
        state.log(Event::Create { name, node, folder })?;
        drop(state);
        Ok(SimFile { sim: self.clone(), node })
    }
}

fn missing() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "no such name")
}

impl Disk for Sim {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Writer>> {
        Ok(Box::new(self.make(path, false)?))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Reader>> {
        let node = self.find(path)?;
        self.state().tree.file(node).ok_or(io::ErrorKind::IsADirectory)?;
        Ok(Box::new(SimFile { sim: self.clone(), node }))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.make(path, true).map(drop)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<(String, bool)>> {
        let (folder, state) = (self.find(dir)?, self.state());
        let inside = state.tree.inside(folder);
        Ok(inside.map(|(name, node)| (name.to_owned(), state.tree.file(node).is_none())).collect())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let (node, from, to) = (self.find(from)?, self.name(from)?, self.name(to)?);
        self.log(Event::Rename { from, to, node })
    }

    /// Removes one name after another, the folder's own last.
    fn remove(&self, path: &Path) -> io::Result<()> {
        let (node, name) = (self.find(path)?, self.name(path)?);
        let inside: Vec<String> = self.state().tree.inside(node).map(|(name, _)| name.to_owned()).collect();
        inside.iter().try_for_each(|name| self.remove(&path.join(name)))?;
        self.log(Event::Remove { name })
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.log(Event::Sync { node: self.find(dir)? })
    }

    fn lock(&self, _: &Path) -> io::Result<Option<Box<dyn LockedFile>>> {
        let free = !std::mem::replace(&mut self.state().held, true);
        Ok(free.then(|| Box::new(Held(self.clone())) as Box<dyn LockedFile>))
    }
}

#[derive(Debug)]
struct Held(Sim);

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
        self.0.state().held = false;
    }
}

#[derive(Debug)]
struct SimFile {
    sim: Sim,
    node: Node,
}

impl Writer for SimFile {
    fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.sim.log(Event::Write { node: self.node, at, bytes: bytes.to_vec() })
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sim.log(Event::Sync { node: self.node })
    }
}

impl Reader for SimFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.sim.state().tree.file(self.node).map_or(0, Vec::len) as u64)
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let state = self.sim.state();
        let found = state.tree.file(self.node).and_then(|all| all.get(offset as usize..)?.get(..bytes.len()));
        bytes.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

#[test]
fn files_made_at_a_time_are_numbered_in_the_order_of_events() {
    let sim = Sim::new("/run");
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let sim = &sim;
            scope.spawn(move || {
                (0..2000)
                    .for_each(|i| drop(sim.make(&sim.dir.join(format!("{thread}.{i}")), false).unwrap()));
            });
        }
    });
    let state = sim.state();
    let made = state.events.iter().map(|event| match event {
        Event::Create { node, .. } => *node,
        other => panic!("{other:?}"),
    });
    assert!(made.eq(1..=8000));
}
