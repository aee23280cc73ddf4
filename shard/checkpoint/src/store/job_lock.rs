//! Lock of one job on its folder, and the run that the job continues.
//!
//! The system locks the file `LOCK` for the job's process until the process ends in any way. The file names the process. A process of this
//! host that stands in an unlocked file is dead. A file system may lock for each host alone, so a process of another host that stands there
//! may be alive: such a folder is taken over by [`Store::taking_over`](super::Store::taking_over) alone.

use super::disk::{Disk, LockedFile};
use super::reader::read_all;
use crate::error::{CheckpointError, io};
use crate::format::run_id::RunId;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Name of the locked file.
const LOCK: &str = "LOCK";

/// Maximum length of the locked file in bytes.
const MOST: u64 = 4096;

/// Time within which a new holder writes its name to the file, and the interval between two looks.
const NAMED_WITHIN: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(10);

/// First second after the year 9999.
const YEAR_10000: u64 = 253_402_300_800;

/// Process whose job holds a folder of checkpoints.
///
/// ```
/// use meshstep_checkpoint::{CheckpointError, Holder, RunId, Store};
///
/// # let dir = std::env::temp_dir().join(format!("meshstep-holder-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&dir)?;
/// let (job, other) = (Store::new(&dir), Store::new(&dir));
/// job.claim()?;
/// let Err(CheckpointError::Held { holder: Some(Holder { pid, .. }), .. }) = other.claim() else {
///     panic!("one job holds the folder");
/// };
/// assert_eq!(pid, std::process::id());
/// drop(job); // and every clone of it
/// other.claim()?;
/// let run: Option<RunId> = other.run(); // known after the first save or load
/// assert_eq!(run, None);
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Holder {
    /// Name of the host.
    pub host: String,
    /// Number of the process on that host.
    pub pid: u32,
    /// Time at which the process took the folder, in seconds since 1970.
    pub since: u64,
}

/// Lock of a job, shared by all clones of a store.
#[derive(Debug, Default)]
pub(crate) struct JobLock {
    state: Mutex<JobState>,
}

#[derive(Debug, Default)]
struct JobState {
    /// The locked file, once this job holds the folder.
    held: Option<HeldFile>,
    /// True once another job has taken the file.
    lost: bool,
    run: Option<RunId>,
    /// True if the caller has asked for the folder, so that a refused save does not give it back.
    claimed: bool,
    /// True during a save, and while steps are removed.
    busy: bool,
}

/// File that the system has locked for this job.
#[derive(Debug)]
struct HeldFile {
    file: Box<dyn LockedFile>,
    disk: Arc<dyn Disk>,
    path: PathBuf,
    /// Name that this job has written to the file; `None` if the disk was full.
    name: Option<Holder>,
}

/// Permission to change the folder, until it is dropped.
#[derive(Debug)]
pub(crate) struct Busy {
    lock: Arc<JobLock>,
    /// True if the folder was taken for this change.
    fresh: bool,
}

/// Folder to take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claimed<'a> {
    pub(crate) disk: &'a Arc<dyn Disk>,
    pub(crate) dir: &'a Path,
    /// True if a job of another host that has not released the folder is known to be dead.
    pub(crate) take_over: bool,
}

impl JobLock {
    /// Takes the folder for this job, until the last clone of its store is dropped.
    pub(crate) fn claim(&self, folder: &Claimed<'_>) -> Result<(), CheckpointError> {
        let mut state = self.state();
        state.take(folder)?;
        state.claimed = true;
        Ok(())
    }

    /// Takes the folder unless this job holds it already, and begins a change of it.
    pub(crate) fn busy(self: &Arc<Self>, folder: &Claimed<'_>) -> Result<Busy, CheckpointError> {
        let mut state = self.state();
        let fresh = state.take(folder)?;
        match std::mem::replace(&mut state.busy, true) {
            false => Ok(Busy { lock: Arc::clone(self), fresh }),
            true => Err(CheckpointError::Locked { dir: folder.dir.to_owned() }),
        }
    }

    /// Releases the folder that a refused change has taken, unless the caller has claimed it since.
    pub(crate) fn give_back(&self, busy: &Busy) {
        let mut state = self.state();
        if busy.fresh && !state.claimed {
            state.release();
        }
    }

    pub(crate) fn run(&self) -> Option<RunId> {
        self.state().run
    }

    pub(crate) fn set_run(&self, run: Option<RunId>) {
        self.state().run = run;
    }

    /// A panic of another holder leaves no half-made state: each change is one assignment.
    fn state(&self) -> MutexGuard<'_, JobState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl JobState {
    /// Takes the folder unless this job holds it already; returns true if it was taken now.
    fn take(&mut self, folder: &Claimed<'_>) -> Result<bool, CheckpointError> {
        let Claimed { disk, dir, take_over } = *folder;
        let path = dir.join(LOCK);
        if let Some(held) = &self.held {
            if held.is_own()? {
                return Ok(false);
            }
            // The other job's name stays in the file.
            (self.held, self.lost) = (None, true);
        }
        if self.lost {
            return Err(CheckpointError::LostLock { path });
        }
        let lock = disk.lock(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => CheckpointError::NoFolder { dir: dir.to_owned() },
            _ if disk.is_link(&path).unwrap_or(false) => CheckpointError::Link { path: path.clone() },
            _ => io("locking", &path)(error),
        });
        let Some(mut file) = lock? else {
            return Err(CheckpointError::Held { dir: dir.to_owned(), holder: named(&**disk, &path) });
        };
        let here = Holder::here();
        let holder = written(&**disk, &path)?;
        if let Some(holder) = holder.filter(|holder| holder.host != here.host && !take_over) {
            return Err(CheckpointError::Abandoned { dir: dir.to_owned(), holder });
        }
        let name = match file.write(&serde_json::to_vec(&here).unwrap_or_default()) {
            Ok(()) => Some(here),
            // The job may have come to make room.
            Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => None,
            Err(error) => return Err(io("locking", &path)(error)),
        };
        self.held = Some(HeldFile { file, disk: Arc::clone(disk), path, name });
        Ok(true)
    }

    fn release(&mut self) {
        // The system releases the lock in any case; a name that stays is one of a dead process, or of another job.
        if let Some(mut held) = self.held.take()
            && matches!(held.is_own(), Ok(true))
        {
            let _ = held.file.write(b"");
        }
    }
}

impl HeldFile {
    /// Returns false if another job has taken the file: it was replaced, or names a job of a host with locks of its own.
    fn is_own(&self) -> Result<bool, CheckpointError> {
        let HeldFile { file, disk, path, name } = self;
        if !file.is_in_place().map_err(io("locking", path))? {
            return Ok(false);
        }
        let found = written(&**disk, path)?;
        Ok(found.is_none_or(|found| name.as_ref().is_none_or(|own| *own == found)))
    }
}

impl Drop for JobLock {
    fn drop(&mut self) {
        self.state().release();
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.lock.state().busy = false;
    }
}

/// Returns the holder of a file that is locked by another job. A job that has just locked the file has not written its name yet: the file
/// is empty, or names a dead process. Returns `None` if the file stays without a name.
fn named(disk: &dyn Disk, path: &Path) -> Option<Holder> {
    let mut looks = NAMED_WITHIN.as_millis() / LOOK.as_millis();
    loop {
        let found = written(disk, path).ok().flatten();
        looks -= 1;
        if looks == 0 || found.as_ref().is_some_and(Holder::may_live) {
            return found;
        }
        sleep(LOOK);
    }
}

/// Returns the process that stands in the file; `None` if it has no name, or anything else.
fn written(disk: &dyn Disk, path: &Path) -> Result<Option<Holder>, CheckpointError> {
    let text = match read_all(disk, path, MOST) {
        Err(CheckpointError::TooLarge { .. } | CheckpointError::Io { kind: ErrorKind::NotFound, .. }) => {
            return Ok(None);
        }
        text => text?,
    };
    let holder: Option<Holder> = serde_json::from_slice(&text).ok();
    Ok(holder.filter(|holder| !holder.host.chars().any(char::is_control)))
}

impl Holder {
    /// Returns this process, from now on.
    fn here() -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Holder { host, pid: std::process::id(), since }
    }

    /// Returns true for this process.
    pub(crate) fn is_here(&self) -> bool {
        let here = Holder::here();
        (&self.host, self.pid) == (&here.host, here.pid)
    }

    /// Returns false if the process is one of this host that does not exist.
    fn may_live(&self) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        self.host != Holder::here().host
            || pid.is_none_or(|pid| test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
    }
}

/// Returns who holds a folder, and what another job can do.
pub(crate) fn held_by(holder: Option<&Holder>) -> String {
    match holder {
        None => "another job: wait for its end".to_owned(),
        Some(holder) if holder.is_here() => {
            format!("{holder}, which is this process: use that `Store` or a clone of it")
        }
        Some(holder) => format!("{holder}: wait for the end of that job"),
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Holder { host, pid, since } = self;
        write!(f, "process {pid} on {host}")?;
        match *since < YEAR_10000 {
            true => {
                let since = UNIX_EPOCH + Duration::from_secs(*since);
                write!(f, " since {}", humantime::format_rfc3339_seconds(since))
            }
            false => Ok(()),
        }
    }
}
