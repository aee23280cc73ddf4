//! Bytes on a device, and bytes of the host that a device copies from and to by itself.

use super::driver::call;
use super::{Device, Error, Event, Stream};
use crate::{Category, Claim, Meter};
use cudarc::driver::sys;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The driver's number for memory that has run out.
const OUT_OF_MEMORY: u32 = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;

/// Bytes of a device. Its drop waits until no stream uses them.
#[derive(Debug)]
pub(crate) struct Memory {
    device: Device,
    /// 0 where there are no bytes.
    start: sys::CUdeviceptr,
}

impl Memory {
    /// `len` bytes, as they happen to be.
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

    /// Where it is.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The address of the first byte on the device.
    pub(crate) fn address(&self) -> u64 {
        self.start
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.start != 0 {
            // SAFETY: allocated once, freed once; the driver waits for work that uses it.
            self.device.late(|| unsafe { call!(cuMemFree_v2(self.start)) });
        }
    }
}

/// Page-locked memory of the host, cached as any, counted for as long as it lives.
///
/// Reading and writing are refused while a stream has yet to copy from it or to it.
#[derive(Debug)]
pub struct Pinned {
    device: Device,
    start: NonNull<u8>,
    len: usize,
    /// Points after which a stream no longer touches it. Whoever touches it holds the lock.
    uses: Mutex<Vec<Event>>,
    _claim: Claim,
}

// SAFETY: plain memory of the process; every access to it holds the lock of `uses`.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` zeros.
    pub fn zeroed(device: &Device, len: usize, meter: &Meter, category: Category) -> Result<Self, Error> {
        device.enter()?;
        let mut start = std::ptr::null_mut();
        // Not write-combined, which reads of the host would find slow.
        // SAFETY: the device's context is current; the place outlives the call; at least one byte.
        let made = unsafe { call!(cuMemHostAlloc(&mut start, len.max(1), 0)) };
        made.map_err(|error| refused(error, device, len, category))?;
        let start = NonNull::new(start.cast::<u8>());
        let start = start.ok_or(Error::OutOfMemory { ordinal: device.ordinal(), bytes: len, category })?;
        // SAFETY: so many bytes, which nobody else knows yet.
        unsafe { start.write_bytes(0, len) };
        let claim = meter.claim(category, len as u64);
        Ok(Pinned { device: device.clone(), start, len, uses: Mutex::default(), _claim: claim })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether no stream uses it, so that it can be read and written.
    pub(super) fn is_idle(&self) -> Result<bool, Error> {
        match self.idle() {
            Ok(_) => Ok(true),
            Err(Error::InUse) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Copies the bytes from `from` on, as many as `into` has.
    pub fn read(&self, from: usize, into: &mut [u8]) -> Result<(), Error> {
        let (at, _held) = (self.at(from, into.len())?, self.idle()?);
        // SAFETY: the range was checked; no stream and, by the lock, no other thread touches it; `into` is not part of it, as
        // nobody has a reference to it.
        unsafe { at.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Sets the bytes from `to` on.
    pub fn write(&self, to: usize, bytes: &[u8]) -> Result<(), Error> {
        let (at, _held) = (self.at(to, bytes.len())?, self.idle()?);
        // SAFETY: as in `read`.
        unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// The address of byte `from`, where `len` bytes are. To be used only while the lock is held.
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

    /// Starts a copy on `stream`, and keeps the point after it.
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
                // Without a point to wait for, the copy is waited for at once.
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

    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let uses = std::mem::take(&mut *self.lock());
        self.device.late(|| {
            uses.iter().try_for_each(Event::reached)?;
            // SAFETY: allocated once, freed once; every copy that uses it is done.
            unsafe { call!(cuMemFreeHost(self.start.as_ptr().cast())) }
        });
    }
}

fn retain_pending(uses: &mut Vec<Event>) -> Result<(), Error> {
    while let Some(done) = uses.iter().map(Event::is_done).position(|done| !matches!(done, Ok(false))) {
        // One that failed stays: what it was for may not have ended.
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
