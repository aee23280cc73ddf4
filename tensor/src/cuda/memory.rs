//! Device memory, and page-locked host memory that a device accesses by itself.

use super::driver::{call, waited};
use super::stream::Owner;
use super::{Device, Error, Event, Stream};
use crate::{Category, Claim, Meter};
use cudarc::driver::sys;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Driver's error code for exhausted memory.
const OUT_OF_MEMORY: u32 = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;

/// Device memory. Its drop waits until no stream uses it.
#[derive(Debug)]
pub(crate) struct Memory {
    device: Device,
    /// 0 if there are no bytes.
    start: sys::CUdeviceptr,
}

impl Memory {
    /// Allocates `len` uninitialised bytes.
    pub(crate) fn new(device: &Device, len: usize, category: Category) -> Result<Self, Error> {
        device.enter()?;
        let mut start = 0;
        if len > 0 {
            // SAFETY: the device's context is current; the place outlives the call.
            let made = unsafe { call!(cuMemAlloc_v2(&mut start, len)) };
            made.map_err(|error| refused(error, device, len, category))?;
        }
        Ok(Memory { device: device.clone(), start })
    }

    /// Device of the memory.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Device address of the first byte.
    pub(crate) fn address(&self) -> u64 {
        self.start
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.start != 0 {
            waited();
            // SAFETY: allocated once, freed once; the driver waits for work that uses it.
            self.device.late(|| unsafe { call!(cuMemFree_v2(self.start)) });
        }
    }
}

/// Device memory of another owner, which is kept alive until no stream uses the memory.
#[derive(Debug)]
pub(crate) struct Foreign {
    device: Device,
    owner: Option<Owner>,
}

impl Foreign {
    pub(super) fn new(device: &Device, owner: Owner) -> Self {
        Foreign { device: device.clone(), owner: Some(owner) }
    }

    /// Device of the memory.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let mut idle = false;
        self.device.late(|| {
            // SAFETY: the device's context is current.
            unsafe { call!(cuCtxSynchronize())? };
            idle = true;
            Ok(())
        });
        if !idle {
            // Streams may still use the memory, so its owner is never dropped.
            std::mem::forget(self.owner.take());
        }
    }
}

/// Page-locked host memory, cached like any other, counted for as long as it lives.
///
/// Reads and writes return an error while a stream's copy from or to it is pending.
#[derive(Debug)]
pub struct Pinned {
    device: Device,
    start: NonNull<u8>,
    len: usize,
    /// Events after which no stream accesses the memory. The lock is held during every access.
    uses: Mutex<Vec<Event>>,
    _claim: Claim,
}

// SAFETY: plain memory of the process; every access to it holds the lock of `uses`.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates `len` zeros.
    pub fn zeroed(device: &Device, len: usize, meter: &Meter, category: Category) -> Result<Self, Error> {
        device.enter()?;
        let mut start = std::ptr::null_mut();
        // Not write-combined: host reads of such memory are slow.
        // SAFETY: the device's context is current; the place outlives the call; at least one byte.
        let made = unsafe { call!(cuMemHostAlloc(&mut start, len.max(1), 0)) };
        made.map_err(|error| refused(error, device, len, category))?;
        let start = NonNull::new(start.cast::<u8>());
        let start = start.ok_or(Error::OutOfMemory { ordinal: device.ordinal(), bytes: len, category })?;
        // SAFETY: the allocation has `len` bytes, and no other code knows its address yet.
        unsafe { start.write_bytes(0, len) };
        let claim = meter.claim(category, len as u64);
        Ok(Pinned { device: device.clone(), start, len, uses: Mutex::default(), _claim: claim })
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns true if no stream uses the memory, so that it can be read and written.
    pub(super) fn is_idle(&self) -> Result<bool, Error> {
        match self.idle() {
            Ok(_) => Ok(true),
            Err(Error::InUse) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Copies `into.len()` bytes from byte `from` on into `into`.
    pub fn read(&self, from: usize, into: &mut [u8]) -> Result<(), Error> {
        let (at, _held) = (self.at(from, into.len())?, self.idle()?);
        // SAFETY: the range was checked; no stream and, by the lock, no other thread accesses it; `into` does not overlap, as
        // there is no reference to this memory.
        unsafe { at.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Writes `bytes` at byte `to`.
    pub fn write(&self, to: usize, bytes: &[u8]) -> Result<(), Error> {
        let (at, _held) = (self.at(to, bytes.len())?, self.idle()?);
        // SAFETY: as in `read`.
        unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Returns the address of byte `from` after checking that `len` bytes follow. Use it only while the lock is held.
    pub(super) fn at(&self, from: usize, len: usize) -> Result<*mut u8, Error> {
        match from.checked_add(len) {
            Some(end) if end <= self.len => {}
            end => {
                let end = end.unwrap_or(usize::MAX);
                return Err(Error::OutOfBounds { start: from, end, len: self.len });
            }
        }
        // SAFETY: within the allocation, or one past its end.
        Ok(unsafe { self.start.as_ptr().add(from) })
    }

    /// Starts a copy on `stream`, and keeps the event after it.
    pub(super) fn copied(
        &self,
        stream: &Stream,
        start: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut uses = self.lock();
        retain_pending(&mut uses)?;
        start()?;
        match stream.record() {
            Ok(event) => uses.push(event),
            Err(error) => {
                // Without an event to wait for, wait for the copy at once.
                stream.synchronize()?;
                return Err(error);
            }
        }
        Ok(())
    }

    fn idle(&self) -> Result<MutexGuard<'_, Vec<Event>>, Error> {
        let mut uses = self.lock();
        retain_pending(&mut uses)?;
        if uses.is_empty() { Ok(uses) } else { Err(Error::InUse) }
    }

    /// Returns the events, also after a panic (decision 119): each change is one call of `Vec`.
    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let uses = std::mem::take(&mut *self.lock());
        self.device.late(|| {
            uses.iter().try_for_each(Event::reached)?;
            waited();
            // SAFETY: allocated once, freed once; every copy that uses it is done.
            unsafe { call!(cuMemFreeHost(self.start.as_ptr().cast())) }
        });
    }
}

fn retain_pending(uses: &mut Vec<Event>) -> Result<(), Error> {
    while let Some(done) = uses.iter().map(Event::is_done).position(|done| !matches!(done, Ok(false))) {
        // A failed event stays in the list: its copy may not have ended.
        uses[done].is_done()?;
        uses.swap_remove(done);
    }
    Ok(())
}

fn refused(error: Error, device: &Device, bytes: usize, category: Category) -> Error {
    match error {
        Error::Call { code: OUT_OF_MEMORY, .. } => {
            Error::OutOfMemory { ordinal: device.ordinal(), bytes, category }
        }
        other => other,
    }
}
