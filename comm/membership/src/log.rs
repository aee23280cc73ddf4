//! The arbiter's log on a disk.

use crate::log_records::{self, MAGIC};
use crate::{LogError, State};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// A log grows up to this, then it begins anew with its last record.
const MAX_BYTES: usize = 1 << 20;

/// A file with every state of an arbiter, of which the last one counts; no other arbiter's while it is open.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: File,
    len: usize,
    /// Held, not written.
    _lock: File,
}

impl Log {
    /// The log at `path` and the last state in it; one is made where there is none. A record that was being written when
    /// its arbiter ended is cut off. A file `path.lock` lies beside it.
    ///
    /// # Errors
    /// [`LogError::Locked`] while another process has it open, [`LogError::NotALog`], [`LogError::Changed`] where something else than
    /// an interrupted write has changed it, [`LogError::System`].
    pub fn open(path: &Path) -> Result<(Self, Option<State>), LogError> {
        let lock = lock(path)?;
        let mut options = OpenOptions::new();
        options.create(true).read(true).append(true);
        let mut file = options.open(path).map_err(system("open", path))?;
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
        // The rest is on the disk with the next record, before which a new arbiter says nothing.
        Ok((log, last))
    }

    /// Adds a state, which is on the disk when this returns. After an error nothing may be said of it: the arbiter ends.
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

    fn write(&mut self, bytes: &[u8]) -> Result<(), LogError> {
        self.file.write_all(bytes).map_err(system("write", &self.path))?;
        self.len += bytes.len();
        Ok(())
    }

    /// A file with this record alone takes the place of the old one, which counts until then.
    fn begin_anew(&mut self, payload: &[u8]) -> Result<(), LogError> {
        let new = beside(&self.path, ".new");
        let mut bytes = MAGIC.to_vec();
        log_records::put(payload, MAGIC.len(), &mut bytes);
        let mut options = OpenOptions::new();
        options.create(true).write(true).truncate(true);
        let mut file = options.open(&new).map_err(system("open", &new))?;
        file.write_all(&bytes).map_err(system("write", &new))?;
        file.sync_all().map_err(system("flush", &new))?;
        std::fs::rename(&new, &self.path).map_err(system("replace", &self.path))?;
        self.sync_directory()?;
        (self.file, self.len) = (file, bytes.len());
        Ok(())
    }

    /// So that the file's name is on the disk too.
    fn sync_directory(&self) -> Result<(), LogError> {
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = parent.unwrap_or(Path::new("."));
        let synced = if cfg!(unix) { File::open(directory).and_then(|file| file.sync_all()) } else { Ok(()) };
        synced.map_err(system("flush", directory))
    }
}

fn lock(path: &Path) -> Result<File, LogError> {
    let beside = beside(path, ".lock");
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true);
    let file = options.open(&beside).map_err(system("open", &beside))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(LogError::Locked { path: path.to_owned() }),
        Err(TryLockError::Error(error)) => Err(system("lock", &beside)(error)),
    }
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
