//! Disk operations of checkpoints, and the operating system's. Tests substitute a disk that forgets everything that was not synced.

use super::direct_io::OnceRead;
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Storage for files. Paths are the caller's; a symbolic link at the end of a path is not followed.
pub trait Disk: Debug + Send + Sync {
    /// Creates a new, empty file; an error if the name is taken.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Writer>>;
    /// Opens a file for reading.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Reader>>;
    /// Creates a new folder; an error if the name is taken.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Lists the names in a folder, in any order, each with true for a folder.
    fn list(&self, dir: &Path) -> io::Result<Vec<(String, bool)>>;
    /// Renames a file or folder; replaces a file of the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file, or a folder and everything in it.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Returns when the names in a folder survive a crash.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// Locks a file, which is created if it does not exist, until the result is dropped or this process ends in any way; `None` if another
    /// holder has it, in this process too.
    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn LockedFile>>>;
    /// Returns true if a path ends in a symbolic link; false on disks without links.
    fn is_link(&self, _path: &Path) -> io::Result<bool> {
        Ok(false)
    }
}

/// File that is being written.
pub trait Writer: Debug + Send {
    /// Writes all of `bytes` at `offset`.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Returns when the written bytes survive a crash; [`Disk::sync_dir`] does the same for the name.
    fn sync(&mut self) -> io::Result<()>;
}

/// File locked by [`Disk::lock`].
pub trait LockedFile: Debug + Send + Sync {
    /// Replaces the contents of the file.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Returns true if the path still names this file; false if the file was removed or replaced.
    fn is_in_place(&self) -> io::Result<bool>;
}

/// File opened for reading.
pub trait Reader: Debug + Send + Sync {
    /// Returns the length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Returns true if the file is empty.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Fills `bytes` from `offset` on; an error if the file ends earlier.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
    /// Reads the `len` bytes at `offset` to some place in `room`, which has `len` bytes or more. The disk may assume that they are not read
    /// again soon.
    fn read_once_at<'r>(&self, offset: u64, len: usize, room: &'r mut [u8]) -> io::Result<&'r [u8]> {
        let bytes = &mut room[..len];
        self.read_at(offset, bytes)?;
        Ok(bytes)
    }
}

/// Length in bytes from which a write comes with advice to the system.
const EAGER: usize = 1 << 20;

/// Files of the operating system.
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

    fn lock(&self, path: &Path) -> io::Result<Option<Box<dyn LockedFile>>> {
        let options =
            OpenOptions::new().write(true).create(true).truncate(false).custom_flags(no_links()).clone();
        let file = options.open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Box::new(OsLock { file, path: path.to_owned() }))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn is_link(&self, path: &Path) -> io::Result<bool> {
        Ok(fs::symlink_metadata(path)?.is_symlink())
    }
}

/// File locked by the system, and its path.
#[derive(Debug)]
struct OsLock {
    file: File,
    path: PathBuf,
}

impl LockedFile for OsLock {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(bytes, 0)?;
        // For other hosts that share the file system.
        self.file.sync_all()
    }

    fn is_in_place(&self) -> io::Result<bool> {
        let own = match self.file.metadata() {
            // Another host of a network file system has removed the file.
            Err(error) if error.kind() == io::ErrorKind::StaleNetworkFileHandle => return Ok(false),
            own => own?,
        };
        match fs::symlink_metadata(&self.path) {
            Ok(found) => Ok((found.dev(), found.ino()) == (own.dev(), own.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for OsLock {
    fn drop(&mut self) {
        // Closing the file would leave the lock with a child process that was forked meanwhile.
        let _ = self.file.unlock();
    }
}

/// Flags that make opening a symbolic link an error, and opening a pipe not wait for its other end.
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

/// Advises the system that these bytes are not read soon. Linux then starts to write them at once, instead of at the sync. It may ignore
/// the advice.
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
