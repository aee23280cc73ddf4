//! Id shared by the ranks of a new communicator.

use super::table::{RawId, Table};
use crate::Error;
use std::ffi::c_char;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ptr::null_mut;

/// NCCL's id of a new communicator: created by one rank, given to all, used once.
///
/// The id contains the address at which that rank listens. Any process with the id can join; NCCL's traffic is neither
/// authenticated nor encrypted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// Length in bytes.
    pub const LEN: usize = 128;

    /// Creates a new id.
    pub fn new() -> Result<Self, Error> {
        let table = Table::get()?;
        let mut raw = RawId([0; Self::LEN]);
        // SAFETY: the place outlives the call.
        table.told("ncclGetUniqueId", unsafe { (table.unique_id)(&mut raw) }, null_mut())?;
        Ok(UniqueId(raw.0.map(|byte| byte as u8)))
    }

    /// Creates the id from the bytes of another rank's id.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        UniqueId(bytes)
    }

    /// Bytes of the id, to send it to another rank.
    pub fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }

    pub(super) fn raw(&self) -> RawId {
        RawId(self.0.map(|byte| byte as c_char))
    }

    /// Returns a number for the id's group, the same on all of its ranks.
    pub(super) fn group(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        hasher.finish()
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UniqueId({:016x})", self.group())
    }
}
