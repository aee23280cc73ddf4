//! What can be wrong with a checkpoint, or with writing one.

use super::bytes::BytesError;
use super::cover::CoverError;
use super::mismatch::Mismatch;
use super::pytorch::PyTorchError;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::io;
use std::path::{Path, PathBuf};

/// A word of this code. By another name, as serde takes a `&str` to be part of what it reads.
type Word = &'static str;

/// Why there is no checkpoint, or why it cannot be trusted. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The disk refuses.
    #[error("{doing} {}: {message}", .path.display())]
    Io {
        /// What was tried.
        #[serde(deserialize_with = "read_doing")]
        doing: Word,
        /// On what.
        path: PathBuf,
        /// The kind of refusal.
        #[serde(serialize_with = "write_kind", deserialize_with = "read_kind")]
        kind: io::ErrorKind,
        /// The system's words.
        message: String,
    },
    /// No step was saved to the folder.
    #[error("{} holds no checkpoint: save one, or name another folder", .dir.display())]
    Nothing {
        /// The folder.
        dir: PathBuf,
    },
    /// Another process saves to the same folder.
    #[error("another job saves to {}: give this one a folder of its own, or wait until it ends", .dir.display())]
    Locked {
        /// The folder.
        dir: PathBuf,
    },
    /// The step was saved before.
    #[error("{} exists: a checkpoint is never written over; remove it first, or save a later step", .path.display())]
    Exists {
        /// Its folder.
        path: PathBuf,
    },
    /// The folder's newest step is a later one.
    #[error("the newest checkpoint in {} is of step {latest}: {step} cannot come behind it; load it, or call `Store::roll_back` first, or save to another folder", .dir.display())]
    Behind {
        /// The folder.
        dir: PathBuf,
        /// What was to be saved.
        step: u64,
        /// What LATEST names.
        latest: u64,
    },
    /// Bytes are not what was written.
    #[error("{} is damaged: {what} have hash {found}, not {expected}; load an earlier step", .path.display())]
    Hash {
        /// The file.
        path: PathBuf,
        /// Which of its bytes.
        what: String,
        /// What was written.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A file is shorter or longer than what was written.
    #[error("{} has {found} bytes, not {expected}: it was cut short or replaced; load an earlier step", .path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// What was written.
        expected: u64,
        /// What is there.
        found: u64,
    },
    /// The manifest is not one.
    #[error("{} is no manifest: {reason}", .path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where reading it ended.
        reason: String,
    },
    /// Written by another version.
    #[error("the checkpoint has format {found}; this program reads format {known}")]
    Format {
        /// What it says.
        found: u32,
        /// What is known.
        known: u32,
    },
    /// The manifest is of another version, or contradicts itself.
    #[error("{}: {source}", .path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong with it: in the text above, so no source of its own.
        r#source: Box<CheckpointError>,
    },
    /// The manifest contradicts itself.
    #[error("the manifest says of {what}: {reason}")]
    Contradiction {
        /// A file, or a tensor and its slot.
        what: String,
        /// What cannot be.
        reason: String,
    },
    /// A tensor's pieces are not all of it.
    #[error("slot {slot:?} of tensor {tensor:?}: {source}")]
    Cover {
        /// The tensor.
        tensor: String,
        /// Which of its vectors.
        slot: String,
        /// What is wrong with them: in the text above, so no source of its own.
        r#source: CoverError,
    },
    /// A file that is read as a whole is larger than any that was written.
    #[error("{} has {found} bytes, more than the {most} such a file may have: it was replaced; load an earlier step", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Bytes it may have.
        most: u64,
        /// What is there.
        found: u64,
    },
    /// Nothing is stored under this name.
    #[error("the checkpoint has no slot {slot:?} of tensor {tensor:?}")]
    Unknown {
        /// The tensor.
        tensor: String,
        /// Which of its vectors.
        slot: String,
    },
    /// A file's own description of a vector is not the manifest's.
    #[error("the header of {} does not describe {what} as the manifest does: {reason}", .path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// A tensor and its slot.
        what: String,
        /// What is not the same.
        reason: String,
    },
    /// Bytes cannot be had; whose they are.
    #[error("{what} cannot be read: {source}")]
    Unreadable {
        /// A tensor and its slot, or several.
        what: String,
        /// Why not: in the text above, so no source of its own.
        r#source: Box<CheckpointError>,
    },
    /// The step is not there, or no longer.
    #[error(
        "{} is gone: the step was removed, as by a job that keeps only the newest, or never saved; load the newest", .path.display()
    )]
    Gone {
        /// What of it was looked for.
        path: PathBuf,
    },
    /// A step's folder is somewhere else.
    #[error("{} is a symbolic link, which is not followed: move the step itself there", .path.display())]
    Link {
        /// The link.
        path: PathBuf,
    },
    /// A step's folder has the name of another step.
    #[error("{} holds step {step}: give it that step's name, or load another step", .path.display())]
    Renamed {
        /// The folder.
        path: PathBuf,
        /// What its manifest says.
        step: u64,
    },
    /// What is saved is for something else.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// An optimizer as bytes.
    #[error(transparent)]
    Bytes(#[from] BytesError),
    /// A file in PyTorch's names.
    #[error(transparent)]
    PyTorch(#[from] PyTorchError),
    /// A rank looks at another folder than rank 0.
    #[error(
        "{} is not the folder that rank 0 saves to: give every rank one folder that all of them share", .dir.display()
    )]
    Elsewhere {
        /// What this rank takes for it.
        dir: PathBuf,
    },
    /// The caller's bytes cannot be called so.
    #[error("a blob is called {name:?}: {reason}")]
    Blob {
        /// What it is called.
        name: String,
        /// Why not.
        reason: String,
    },
    /// Nobody calls the hook of a background save.
    #[error("a background save calls no hook: leave `Save::progress` out, and ask `Saving::progress`")]
    Progress,
    /// A background save whose ranks have lost each other.
    #[error("the save of step {step} ended on its way: {message}; the checkpoints before it are whole")]
    Lost {
        /// What it was to be called.
        step: u64,
        /// What ended it.
        message: String,
    },
    /// An exchange between workers that has failed, and not yet arrived.
    #[error("what is on its way between workers has failed: {message}; save once it has arrived")]
    OnItsWay {
        /// What ended it.
        message: String,
    },
    /// Groups that had parted, and another number of them.
    #[error(
        "{saved} groups were saved that had parted, and there are {here}; load into {saved}, or synchronize them before saving"
    )]
    Groups {
        /// How many there were.
        saved: usize,
        /// How many there are.
        here: usize,
    },
    /// Nobody to move to, or from.
    #[error("no rank has an optimizer to move {direction}; give each rank that has one")]
    NoSide {
        /// `from`, or `to`.
        direction: String,
    },
    /// What ranks have is not of one optimizer.
    #[error("ranks {} and {} tell {what} apart; move between two steps, from one optimizer to one", .ranks[0], .ranks[1])]
    Apart {
        /// What differs.
        what: String,
        /// Two ranks that do.
        ranks: [usize; 2],
    },
    /// Memory that could not be had or read.
    #[error("{message}")]
    Memory {
        /// What it says of itself.
        message: String,
    },
}

impl CheckpointError {
    /// An error of this rank's memory.
    pub(crate) fn memory<E: ToString>(error: E) -> Self {
        CheckpointError::Memory { message: error.to_string() }
    }
}

/// What the code here tries on a disk.
const DOINGS: [&str; 11] = [
    "opening",
    "measuring",
    "reading",
    "creating",
    "writing",
    "syncing",
    "renaming",
    "removing",
    "listing",
    "locking",
    "using",
];

/// Kinds of refusal that a disk has.
const KINDS: [io::ErrorKind; 22] = [
    io::ErrorKind::NotFound,
    io::ErrorKind::PermissionDenied,
    io::ErrorKind::AlreadyExists,
    io::ErrorKind::InvalidInput,
    io::ErrorKind::InvalidData,
    io::ErrorKind::TimedOut,
    io::ErrorKind::WriteZero,
    io::ErrorKind::Interrupted,
    io::ErrorKind::Unsupported,
    io::ErrorKind::UnexpectedEof,
    io::ErrorKind::OutOfMemory,
    io::ErrorKind::NotADirectory,
    io::ErrorKind::IsADirectory,
    io::ErrorKind::DirectoryNotEmpty,
    io::ErrorKind::ReadOnlyFilesystem,
    io::ErrorKind::StaleNetworkFileHandle,
    io::ErrorKind::StorageFull,
    io::ErrorKind::QuotaExceeded,
    io::ErrorKind::FileTooLarge,
    io::ErrorKind::InvalidFilename,
    io::ErrorKind::CrossesDevices,
    io::ErrorKind::ResourceBusy,
];

fn read_doing<'de, D: Deserializer<'de>>(from: D) -> Result<Word, D::Error> {
    let text = String::deserialize(from)?;
    Ok(DOINGS.into_iter().find(|&doing| doing == text).unwrap_or("using"))
}

fn write_kind<S: Serializer>(kind: &io::ErrorKind, to: S) -> Result<S::Ok, S::Error> {
    format!("{kind:?}").serialize(to)
}

fn read_kind<'de, D: Deserializer<'de>>(from: D) -> Result<io::ErrorKind, D::Error> {
    let text = String::deserialize(from)?;
    Ok(KINDS.into_iter().find(|kind| format!("{kind:?}") == text).unwrap_or(io::ErrorKind::Other))
}

/// For `map_err`: what was tried, and on what.
pub(super) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |error| CheckpointError::Io { doing, path, kind: error.kind(), message: error.to_string() }
}
