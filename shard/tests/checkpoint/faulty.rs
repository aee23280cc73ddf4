//! A disk that refuses one call.

use meshstep_shard::checkpoint::{Disk, Reader, Writer};
use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// One rank's view of a disk, which refuses the call of a number, and all later ones where it is `gone` for good.
#[derive(Clone, Debug)]
pub(crate) struct Faulty<D> {
    inner: D,
    calls: Arc<Calls>,
}

#[derive(Debug)]
pub(crate) struct Calls {
    left: AtomicUsize,
    gone: bool,
    kind: io::ErrorKind,
}

impl<D: Disk + Clone + 'static> Faulty<D> {
    pub(crate) fn new(inner: D, gone: bool, kind: io::ErrorKind) -> Self {
        Faulty { inner, calls: Arc::new(Calls { left: AtomicUsize::new(usize::MAX), gone, kind }) }
    }

    /// Refuses after `calls` more; `usize::MAX`: none.
    pub(crate) fn after(&self, calls: usize) {
        self.calls.left.store(calls, SeqCst);
    }
}

impl Calls {
    fn call(&self) -> io::Result<()> {
        let refused = || io::Error::new(self.kind, "as was asked for");
        let count = |left: usize| match left {
            usize::MAX => Some(left),
            0 if self.gone => None,
            0 => Some(usize::MAX),
            left => Some(left - 1),
        };
        match self.left.fetch_update(SeqCst, SeqCst, count) {
            Ok(0) | Err(_) => Err(refused()),
            Ok(_) => Ok(()),
        }
    }
}

impl<D: Disk + Clone + 'static> Disk for Faulty<D> {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Writer>> {
        self.calls.call()?;
        Ok(Box::new(File { file: self.inner.create(path)?, calls: Arc::clone(&self.calls) }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Reader>> {
        self.calls.call()?;
        Ok(Box::new(File { file: self.inner.open(path)?, calls: Arc::clone(&self.calls) }))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.calls.call()?;
        self.inner.create_dir(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<(String, bool)>> {
        self.calls.call()?;
        self.inner.list(dir)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.calls.call()?;
        self.inner.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.calls.call()?;
        self.inner.remove(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.calls.call()?;
        self.inner.sync_dir(dir)
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Debug + Send + Sync>>> {
        self.calls.call()?;
        self.inner.lock(path)
    }
}

#[derive(Debug)]
struct File<F: ?Sized> {
    calls: Arc<Calls>,
    file: Box<F>,
}

impl Writer for File<dyn Writer> {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.calls.call()?;
        self.file.write_at(offset, bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.calls.call()?;
        self.file.sync()
    }
}

impl Reader for File<dyn Reader> {
    fn len(&self) -> io::Result<u64> {
        self.calls.call()?;
        self.file.len()
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.calls.call()?;
        self.file.read_at(offset, bytes)
    }
}
