//! Disk with a hook: a test sees every call first.

use meshstep_checkpoint::{Disk, LockedFile, Reader, Writer};
use std::fmt::{self, Debug};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Call that is about to be made, with its file or folder.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call<'a> {
    Create,
    Open,
    Remove(&'a Path),
    /// Read of a number of bytes.
    Read(&'a Path, usize),
    /// Any other call.
    Other,
}

type Before = Arc<dyn Fn(Call<'_>) -> io::Result<()> + Send + Sync>;

/// Disk behind the hook.
#[derive(Clone)]
pub(crate) struct Hooked<D> {
    inner: D,
    before: Before,
}

impl<D> Hooked<D> {
    /// Runs `before` in front of each call, and skips the call if that returns an error.
    pub(crate) fn new(inner: D, before: impl Fn(Call<'_>) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Hooked { inner, before: Arc::new(before) }
    }

    fn file<F: ?Sized>(&self, path: &Path, file: Box<F>) -> Box<File<F>> {
        Box::new(File { file, path: path.to_owned(), before: Arc::clone(&self.before) })
    }
}

impl<D> Debug for Hooked<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked").finish_non_exhaustive()
    }
}

impl<D: Disk> Disk for Hooked<D> {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Writer>> {
        (self.before)(Call::Create)?;
        Ok(self.file(path, self.inner.create(path)?))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Reader>> {
        (self.before)(Call::Open)?;
        Ok(self.file(path, self.inner.open(path)?))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        (self.before)(Call::Other)?;
        self.inner.create_dir(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<(String, bool)>> {
        (self.before)(Call::Other)?;
        self.inner.list(dir)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        (self.before)(Call::Other)?;
        self.inner.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        (self.before)(Call::Remove(path))?;
        self.inner.remove(path)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        (self.before)(Call::Other)?;
        self.inner.sync_dir(dir)
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn LockedFile>>> {
        (self.before)(Call::Other)?;
        self.inner.lock(path)
    }

    fn is_link(&self, path: &Path) -> io::Result<bool> {
        self.inner.is_link(path)
    }
}

struct File<F: ?Sized> {
    before: Before,
    path: PathBuf,
    file: Box<F>,
}

impl<F: ?Sized> Debug for File<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("File").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Writer for File<dyn Writer> {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        (self.before)(Call::Other)?;
        self.file.write_at(offset, bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        (self.before)(Call::Other)?;
        self.file.sync()
    }
}

impl Reader for File<dyn Reader> {
    fn len(&self) -> io::Result<u64> {
        (self.before)(Call::Other)?;
        self.file.len()
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        (self.before)(Call::Read(&self.path, bytes.len()))?;
        self.file.read_at(offset, bytes)
    }
}
