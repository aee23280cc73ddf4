//! Errors of the disk as text, which ranks exchange.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::io;

/// Static text of this code. The alias keeps serde from borrowing a `&str` from its input.
pub(crate) type Word = &'static str;

/// Disk operations of this code.
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

/// Kinds of disk errors.
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

pub(crate) fn read_doing<'de, D: Deserializer<'de>>(from: D) -> Result<Word, D::Error> {
    let text = String::deserialize(from)?;
    Ok(DOINGS.into_iter().find(|&doing| doing == text).unwrap_or("using"))
}

pub(crate) fn write_kind<S: Serializer>(kind: &io::ErrorKind, to: S) -> Result<S::Ok, S::Error> {
    format!("{kind:?}").serialize(to)
}

pub(crate) fn read_kind<'de, D: Deserializer<'de>>(from: D) -> Result<io::ErrorKind, D::Error> {
    let text = String::deserialize(from)?;
    Ok(KINDS.into_iter().find(|kind| format!("{kind:?}") == text).unwrap_or(io::ErrorKind::Other))
}
