//! A disk on which something happens before one call.

use meshstep_shard::checkpoint::{Disk, Reader, Writer};
use std::fmt::{self, Debug};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// One rank's view of a disk.
#[derive(Clone, Debug)]
pub(crate) struct Faulty<D> {
    inner: D,
    calls: Arc<Calls>,
}

/// What happens before the call of a number.
pub(crate) enum Then {
    /// It is refused with this, and all later ones where the disk is gone for good.
    Refuse(Box<dyn Fn() -> io::Error + Send + Sync>, bool),
    /// This, and the call goes on.
    Do(Box<dyn Fn() + Send + Sync>),
}

struct Calls {
    /// One more than the calls before; 0: it has happened, and goes on.
    left: AtomicUsize,
    then: Then,
}

impl Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").field("left", &self.left).finish_non_exhaustive()
    }
}

impl<D: Disk + Clone + 'static> Faulty<D> {
    /// Refuses one call, or this and all later ones.
    pub(crate) fn new(inner: D, gone: bool, kind: io::ErrorKind) -> Self {
        let refusal = move || io::Error::new(kind, "as was asked for");
        Self::with(inner, Then::Refuse(Box::new(refusal), gone))
    }

    pub(crate) fn with(inner: D, then: Then) -> Self {
        Faulty { inner, calls: Arc::new(Calls { left: AtomicUsize::new(usize::MAX), then }) }
    }

    /// It happens after `calls` more; `usize::MAX`: never.
    pub(crate) fn after(&self, calls: usize) {
        self.calls.left.store(calls.saturating_add(1), SeqCst);
    }

    /// Whether it has not happened yet; from now on it does not.
    pub(crate) fn never_came(&self) -> bool {
        !matches!(self.calls.left.swap(usize::MAX, SeqCst), 0 | usize::MAX)
    }
}

impl Calls {
    fn call(&self) -> io::Result<()> {
        let gone = matches!(self.then, Then::Refuse(_, true));
        let count = |left: usize| match left {
            usize::MAX => Some(left),
            0 => None,
            1 if !gone => Some(usize::MAX),
            left => Some(left - 1),
        };
        match (self.left.fetch_update(SeqCst, SeqCst, count), &self.then) {
            (Ok(1) | Err(_), Then::Refuse(error, _)) => Err(error()),
            (Ok(1) | Err(_), Then::Do(act)) => {
                act();
                Ok(())
            }
            (Ok(_), _) => Ok(()),
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
