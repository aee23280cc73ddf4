//! What checkpoints ask of a disk, and the one there is. Tests put another in its place, which forgets what was not synced.

use super::past_cache::OnceRead;
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// A place for files. Paths are the caller's; nothing follows a symbolic link at their end.
pub trait Disk: Debug + Send + Sync {
    /// A new, empty file; an error where the name is taken.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Writer>>;
    /// A file to read.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Reader>>;
    /// A new folder; an error where the name is taken.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// The names in a folder, in no order, and whether each is a folder.
    fn list(&self, dir: &Path) -> io::Result<Vec<(String, bool)>>;
    /// Another name for a file or folder, in place of a file that had it.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file, or a folder and what is in it.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Returns when the names in a folder would survive a crash.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// Keeps others out until it is dropped, also where this process ends in any way; `None` where one holds it.
    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Debug + Send + Sync>>>;
    /// Whether a path ends in a symbolic link; a disk without any has none.
    fn is_link(&self, _path: &Path) -> io::Result<bool> {
        Ok(false)
    }
}

/// A file that is written.
pub trait Writer: Debug + Send {
    /// Writes all of `bytes` at `offset`.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Returns when what was written would survive a crash; its name is the folder's.
    fn sync(&mut self) -> io::Result<()>;
}

/// A file that is read.
pub trait Reader: Debug + Send + Sync {
    /// Its bytes.
    fn len(&self) -> io::Result<u64>;
    /// Whether it has none.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Fills `bytes` with what is at `offset`; an error where it ends before.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
    /// The `len` bytes at `offset`, somewhere in `room`, which has as many or more. Nobody is about to read them again.
    fn read_once_at<'r>(&self, offset: u64, len: usize, room: &'r mut [u8]) -> io::Result<&'r [u8]> {
        let bytes = &mut room[..len];
        self.read_at(offset, bytes)?;
        Ok(bytes)
    }
}

/// Bytes of a write that are worth telling the system what becomes of them.
const EAGER: usize = 1 << 20;

/// The operating system's files.
#[derive(Clone, Copy, Debug, Default)]
pub struct Os;

impl Disk for Os {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Writer>> {
        Ok(Box::new(OpenOptions::new().write(true).create_new(true).open(path)?))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Reader>> {
        let file = OpenOptions::new().read(true).custom_flags(no_links()).open(path)?;
        match file.metadata()?.is_file() {
            true => Ok(Box::new(OnceRead::new(file))),
            // A pipe or a device might never answer.
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no plain file")),
        }
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<(String, bool)>> {
        let entry = |entry: io::Result<fs::DirEntry>| {
            let entry = entry?;
            Ok((entry.file_name().to_string_lossy().into_owned(), entry.file_type()?.is_dir()))
        };
        fs::read_dir(dir)?.map(entry).collect()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn Debug + Send + Sync>>> {
        let options =
            OpenOptions::new().write(true).create(true).truncate(false).custom_flags(no_links()).clone();
        let file = options.open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Box::new(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn is_link(&self, path: &Path) -> io::Result<bool> {
        Ok(fs::symlink_metadata(path)?.is_symlink())
    }
}

/// Opening a symbolic link is an error, and a pipe does not wait for its other end.
fn no_links() -> i32 {
    (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits() as i32
}

impl Writer for File {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, offset)?;
        if bytes.len() >= EAGER {
            begin_writing(self, offset, bytes.len() as u64);
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// Nobody reads these bytes soon: Linux's disk begins at once then, and not when a sync waits for it. It may refuse the advice.
fn begin_writing(file: &File, offset: u64, len: u64) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, offset, len.try_into().ok(), rustix::fs::Advice::DontNeed);
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, len);
}

impl Reader for OnceRead {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file().metadata()?.len())
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file().read_exact_at(bytes, offset)
    }

    fn read_once_at<'r>(&self, offset: u64, len: usize, room: &'r mut [u8]) -> io::Result<&'r [u8]> {
        self.read_past_cache(offset, len, room)
    }
}
