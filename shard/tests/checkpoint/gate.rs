//! A disk on which nothing is created until a gate opens.

use crate::sim::Sim;
use meshstep_shard::checkpoint::{Disk, Reader, Writer};
use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};

/// Closed at first.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// Whether it is open, and how many wait in front of it.
    state: Mutex<(bool, usize)>,
    changed: Condvar,
    shattered: AtomicBool,
}

impl Gate {
    pub(crate) fn open(&self) {
        self.state.lock().unwrap().0 = true;
        self.changed.notify_all();
    }

    /// Opens it once somebody waits.
    pub(crate) fn open_for_one(&self) {
        let state = self.state.lock().unwrap();
        self.changed.wait_while(state, |(_, waiting)| *waiting == 0).unwrap().0 = true;
        self.changed.notify_all();
    }

    /// Whoever comes to it panics.
    pub(crate) fn shatter(&self) {
        self.shattered.store(true, SeqCst);
    }

    fn pass(&self) {
        assert!(!self.shattered.load(SeqCst), "the test's disk panics");
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |(open, _)| !*open).unwrap());
    }
}

/// The disk behind it.
#[derive(Clone, Debug)]
pub(crate) struct Gated {
    pub(crate) sim: Sim,
    pub(crate) gate: Arc<Gate>,
}

impl Disk for Gated {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Writer>> {
        self.gate.pass();
        self.sim.create(path)
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Reader>> {
        self.sim.open(path)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.sim.create_dir(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<(String, bool)>> {
        self.sim.list(dir)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.sim.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.sim.remove(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.sim.sync_dir(dir)
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Debug + Send + Sync>>> {
        self.sim.lock(path)
    }
}
