//! Files in memory, for reading.

use meshstep_checkpoint::{Disk, LockedFile, Reader, Writer};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files by path; writing is not possible.
#[derive(Clone, Debug, Default)]
pub struct Memory(pub BTreeMap<PathBuf, Arc<[u8]>>);

#[derive(Debug)]
struct File(Arc<[u8]>);

fn refused<T>() -> io::Result<T> {
    Err(io::ErrorKind::Unsupported.into())
}

impl Disk for Memory {
    fn create(&self, _: &Path) -> io::Result<Box<dyn Writer>> {
        refused()
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Reader>> {
        let bytes = self.0.get(path).ok_or(io::ErrorKind::NotFound)?;
        Ok(Box::new(File(Arc::clone(bytes))))
    }

    fn create_dir(&self, _: &Path) -> io::Result<()> {
        refused()
    }

    fn list(&self, _: &Path) -> io::Result<Vec<(String, bool)>> {
        refused()
    }

    fn rename(&self, _: &Path, _: &Path) -> io::Result<()> {
        refused()
    }

    fn remove(&self, _: &Path) -> io::Result<()> {
        refused()
    }

    fn sync_dir(&self, _: &Path) -> io::Result<()> {
        refused()
    }

    fn lock(&self, _: &Path) -> io::Result<Option<Box<dyn LockedFile>>> {
        refused()
    }
}

impl Reader for File {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let rest = usize::try_from(offset).ok().and_then(|at| self.0.get(at..));
        let found = rest.and_then(|rest| rest.get(..bytes.len())).ok_or(io::ErrorKind::UnexpectedEof)?;
        bytes.copy_from_slice(found);
        Ok(())
    }
}
