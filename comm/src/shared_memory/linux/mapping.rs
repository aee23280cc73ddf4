//! Mappings of a rank's memory into this process.

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};

/// Access of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// A peer's memory.
    Read,
    /// This rank's memory.
    ReadWrite,
}

impl Access {
    fn flags(self) -> ProtFlags {
        match self {
            Access::Read => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        }
    }
}

/// Addresses that belong to this value until it is dropped.
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the addresses are the value's own, and munmap may be called on any thread.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset`, `times` times in a row: a range that wraps around is contiguous in two copies.
    pub(super) fn repeated(
        file: BorrowedFd<'_>,
        offset: usize,
        len: usize,
        times: usize,
        access: Access,
    ) -> rustix::io::Result<Self> {
        let reserved = Mapping::reserve(len * times)?;
        for copy in 0..times {
            let at = reserved.start.as_ptr().wrapping_add(copy * len).cast();
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: the addresses `at..at + len` are inside of `reserved`, which nobody else uses.
            unsafe { mmap(at, len, access.flags(), flags, file, offset as u64) }?;
        }
        Ok(reserved)
    }

    /// Reserves addresses without memory.
    fn reserve(len: usize) -> rustix::io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the system chooses addresses that nobody uses.
        let start = unsafe { mmap_anonymous(null_mut(), len, ProtFlags::empty(), flags) }?;
        let start = NonNull::new(start.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Mapping { start, len })
    }

    /// Returns the first address.
    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the number of mapped bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the addresses are this value's own, and references into them borrow it. An error leaves them mapped.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({} bytes)", self.len)
    }
}
