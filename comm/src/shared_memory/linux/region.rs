//! Memory of one rank: a sealed memfd that the rank writes and its peers map read-only.

use super::layout::{Layout, RingStream};
use super::mapping::{Access, Mapping};
use crate::shared_memory::RegionFault;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Result;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;

/// Seals of every region. `SHRINK` and `GROW` fix the size, so that no access can lie past the end and raise SIGBUS.
/// `FUTURE_WRITE` (Linux 5.1) forbids writes and writable mappings but the owner's own. `SEAL` forbids further seals.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// Words and rings of one rank. The owner maps all of its rings; a peer maps the common ring and its own.
#[derive(Debug)]
pub(super) struct Region {
    layout: Layout,
    words: Mapping,
    common: Mapping,
    /// The owner's rings by reader, and one ring in a peer.
    singles: Vec<Mapping>,
    access: Access,
}

impl Region {
    /// Creates this rank's region, and the file for its peers.
    pub(super) fn create(layout: Layout) -> Result<(Self, OwnedFd)> {
        let file = memfd_create("meshstep", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, layout.bytes() as u64)?;
        let readers: Vec<usize> = (0..layout.world_size).collect();
        let region = Region::map(file.as_fd(), layout, &readers, Access::ReadWrite)?;
        fcntl_add_seals(&file, SEALS)?;
        Ok((region, file))
    }

    /// Maps the region of a peer, after checks that make its size final.
    pub(super) fn attach(
        file: BorrowedFd<'_>,
        layout: Layout,
        reader: usize,
    ) -> std::result::Result<Self, RegionFault> {
        let found = fcntl_get_seals(file).map_err(unmapped)?;
        if !found.contains(SEALS) {
            return Err(RegionFault::Seals { found: found.bits(), needed: SEALS.bits() });
        }
        let (found, needed) = (fstat(file).map_err(unmapped)?.st_size, layout.bytes());
        if found != needed as i64 {
            return Err(RegionFault::Size { found, needed });
        }
        Region::map(file, layout, &[reader], Access::Read).map_err(unmapped)
    }

    fn map(file: BorrowedFd<'_>, layout: Layout, readers: &[usize], access: Access) -> Result<Self> {
        let ring = |stream| {
            let range = layout.ring(stream);
            Mapping::repeated(file, range.start, range.len(), 2, access)
        };
        Ok(Region {
            words: Mapping::repeated(file, 0, layout.words(), 1, access)?,
            common: ring(RingStream::Common)?,
            singles: readers.iter().map(|&reader| ring(RingStream::To(reader))).collect::<Result<_>>()?,
            layout,
            access,
        })
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the word at `offset`, one of the layout's. A peer's words may only be loaded.
    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.words.len(), "{offset} is no word");
        // SAFETY: the word is mapped as long as `self` lives, and aligned because the mapping is. All processes access it by
        // atomic operations alone; a process that breaks this rule alters its own words, and their values are checked.
        unsafe { AtomicU64::from_ptr(self.words.start().add(offset).cast()) }
    }

    /// Returns the bytes `position..position + len` of a peer's stream in its ring.
    ///
    /// # Safety
    /// The owner does not write these bytes as long as the slice lives.
    pub(super) unsafe fn bytes(&self, stream: RingStream, position: u64, len: usize) -> &[u8] {
        let at = self.place(stream, position, len);
        // SAFETY: `place` checked that the bytes are mapped, and the caller that nobody writes them.
        unsafe { std::slice::from_raw_parts(at, len) }
    }

    /// Copies `bytes` to `position` of a stream of this rank.
    pub(super) fn fill(&mut self, stream: RingStream, position: u64, bytes: &[u8]) {
        assert_eq!(self.access, Access::ReadWrite, "a peer's memory is read-only");
        let at = self.place(stream, position, bytes.len());
        // SAFETY: `place` checked that the bytes are mapped, the mapping is writable, and this process has no reference to them:
        // `bytes` is for a peer's memory, and a peer's mapping has other addresses.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
    }

    /// Returns the address of `position`. The second copy of the ring lets `len` bytes follow it.
    fn place(&self, stream: RingStream, position: u64, len: usize) -> *mut u8 {
        let capacity = self.layout.capacity(stream);
        assert!(len <= capacity, "{len} bytes in a ring of {capacity}");
        let ring = match (stream, self.access) {
            (RingStream::Common, _) => &self.common,
            (RingStream::To(reader), Access::ReadWrite) => &self.singles[reader],
            (RingStream::To(_), Access::Read) => &self.singles[0],
        };
        ring.start().wrapping_add((position % capacity as u64) as usize)
    }
}

fn unmapped(error: rustix::io::Errno) -> RegionFault {
    RegionFault::System { message: error.to_string() }
}
