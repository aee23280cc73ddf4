//! The arbiter's log on a disk.

use crate::log_records::{self, MAGIC};
use crate::{LogError, State};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// Size at which a log is replaced by one with its last record alone.
const MAX_BYTES: usize = 1 << 20;

/// A file with every state of an arbiter, of which the last one is valid; locked by one process while it is open.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: File,
    len: usize,
    /// Held for the lock, never written.
    _lock: File,
}

impl Log {
    /// Opens the log at `path`, or creates one, and returns the last state in it. A record that was being written when its arbiter
    /// ended is cut off. Files `path.lock` and, for a moment, `path.new` lie beside it. A symbolic link in place of any of the three is
    /// not followed.
    ///
    /// # Errors
    /// [`LogError::Locked`] while another process has the log open, [`LogError::NotALog`], [`LogError::Changed`] if the file was
    /// changed by anything but an interrupted write, [`LogError::System`].
    pub fn open(path: &Path) -> Result<(Self, Option<State>), LogError> {
        let lock = lock(path)?;
        let opened = options().create(true).read(true).append(true).open(path);
        let mut file = opened.map_err(system("open", path))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(system("read", path))?;
        let read = log_records::read(&bytes)?;
        let last = match read.last {
            None => None,
            Some(record) => Some(State::decode(record).ok_or(LogError::NotALog)?),
        };
        let mut log = Log { path: path.to_owned(), file, len: read.end, _lock: lock };
        log.file.set_len(read.end as u64).map_err(system("cut", path))?;
        if read.end == 0 {
            log.write(MAGIC)?;
            log.sync_directory()?;
        }
        // The truncation reaches the disk with the next record, before which a new arbiter sends nothing.
        Ok((log, last))
    }

    /// Appends a state and returns once it is on the disk. After an error the arbiter must not send any of it, and ends.
    ///
    /// # Errors
    /// [`LogError::System`].
    pub fn append(&mut self, state: &State) -> Result<(), LogError> {
        let payload = state.encode();
        if self.len + payload.len() > MAX_BYTES && self.len > MAGIC.len() {
            return self.begin_anew(&payload);
        }
        let mut record = Vec::new();
        log_records::put(&payload, self.len, &mut record);
        self.write(&record)?;
        self.file.sync_data().map_err(system("flush", &self.path))
    }

    /// Raises the term in the log at `path` above every term of the arbiter that it is a copy of: the next start on it supersedes that
    /// arbiter, even one that is started again. Returns the new term.
    ///
    /// # Errors
    /// As for [`open`](Self::open) and [`append`](Self::append); [`LogError::Empty`] for a log without a state.
    pub fn promote(path: &Path) -> Result<u64, LogError> {
        let (mut log, last) = Self::open(path)?;
        let mut state = last.ok_or_else(|| LogError::Empty { path: path.to_owned() })?;
        state.promote();
        log.append(&state)?;
        Ok(state.term)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), LogError> {
        self.file.write_all(bytes).map_err(system("write", &self.path))?;
        self.len += bytes.len();
        Ok(())
    }

    /// Writes a file with this record alone and renames it over the old one, which is valid until then.
    fn begin_anew(&mut self, payload: &[u8]) -> Result<(), LogError> {
        let new = beside(&self.path, ".new");
        let mut bytes = MAGIC.to_vec();
        log_records::put(payload, MAGIC.len(), &mut bytes);
        // An arbiter that ended before it renamed the file has left it.
        match std::fs::remove_file(&new) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(system("remove", &new)(error)),
            _ => {}
        }
        let mut file = options().create_new(true).write(true).open(&new).map_err(system("create", &new))?;
        file.write_all(&bytes).map_err(system("write", &new))?;
        file.sync_all().map_err(system("flush", &new))?;
        std::fs::rename(&new, &self.path).map_err(system("replace", &self.path))?;
        self.sync_directory()?;
        (self.file, self.len) = (file, bytes.len());
        Ok(())
    }

    /// Flushes the directory, so that the file's name is on the disk too.
    fn sync_directory(&self) -> Result<(), LogError> {
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = parent.unwrap_or(Path::new("."));
        let synced = if cfg!(unix) { File::open(directory).and_then(|file| file.sync_all()) } else { Ok(()) };
        synced.map_err(system("flush", directory))
    }
}

fn lock(path: &Path) -> Result<File, LogError> {
    let beside = beside(path, ".lock");
    let opened = options().create(true).truncate(false).write(true).open(&beside);
    let file = opened.map_err(system("open", &beside))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(LogError::Locked { path: path.to_owned() }),
        Err(TryLockError::Error(error)) => Err(system("lock", &beside)(error)),
    }
}

/// Returns options that follow no symbolic link at the end of a path, and do not wait for the other end of a pipe.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    }
    options
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn system(what: &'static str, path: &Path) -> impl Fn(std::io::Error) -> LogError {
    let path = path.to_owned();
    move |error| LogError::System { what, path: path.clone(), message: error.to_string() }
}
