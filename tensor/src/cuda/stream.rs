//! Orders of work, and the points in them that others wait for.

use super::driver::call;
use super::memory::{Memory, Pinned};
use super::{Device, Error};
use cudarc::driver::sys;
use std::sync::Arc;

/// An order of work on a device. Work on different streams has no order but what [`wait`](Stream::wait) makes.
#[derive(Clone, Debug)]
pub struct Stream(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: Device,
    handle: sys::CUstream,
}

// SAFETY: a stream is a handle that the driver locks by itself; every call makes its context current first.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// A point in a stream's order.
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: sys::CUevent,
}

// SAFETY: as for streams.
unsafe impl Send for Event {}
// SAFETY: as for streams.
unsafe impl Sync for Event {}

impl Stream {
    /// A stream that the default stream does not wait for.
    pub fn new(device: &Device) -> Result<Self, Error> {
        Self::with_priority(device, 0)
    }

    /// A stream whose work goes before that of others, for communication.
    pub fn urgent(device: &Device) -> Result<Self, Error> {
        device.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the places outlive the call.
        unsafe { call!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest))? };
        Self::with_priority(device, greatest)
    }

    fn with_priority(device: &Device, priority: i32) -> Result<Self, Error> {
        device.enter()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the device's context is current; the place outlives the call.
        unsafe { call!(cuStreamCreateWithPriority(&mut handle, flags, priority))? };
        Ok(Stream(Arc::new(Inner { device: device.clone(), handle })))
    }

    /// Where its work takes place.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The driver's handle, for kernels and libraries. It lives as long as this stream or a clone of it.
    pub fn as_raw(&self) -> *mut std::ffi::c_void {
        self.0.handle.cast()
    }

    /// The point after all work so far.
    pub fn record(&self) -> Result<Event, Error> {
        self.enter()?;
        let event = Event::new(&self.0.device)?;
        // SAFETY: both live, on one device.
        unsafe { call!(cuEventRecord(event.handle, self.0.handle))? };
        Ok(event)
    }

    /// What follows here begins after `event`. The host goes on at once.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        self.enter()?;
        // SAFETY: both live; events of other devices may be waited for.
        unsafe { call!(cuStreamWaitEvent(self.0.handle, event.handle, 0)) }
    }

    /// Returns when all work so far is done, or with what went wrong in it.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.enter()?;
        // SAFETY: the stream lives.
        unsafe { call!(cuStreamSynchronize(self.0.handle)) }
    }

    /// Copies `len` bytes of host memory, from byte `from` on, to byte `to` on of the device's.
    pub fn copy_in(
        &self,
        host: &Pinned,
        from: usize,
        memory: &Memory,
        to: usize,
        len: usize,
    ) -> Result<(), Error> {
        self.at("device memory", memory.device())?;
        let (source, target) = (host.at(from, len)?, memory.at(to, len)?);
        // SAFETY: both ranges were checked. The driver frees `memory` after work that uses it, and `host` waits for the copy.
        let start = || unsafe { call!(cuMemcpyHtoDAsync_v2(target, source.cast(), len, self.0.handle)) };
        if len == 0 { Ok(()) } else { host.copied(self, start) }
    }

    /// Copies `len` bytes of device memory, from byte `from` on, to byte `to` on of the host's.
    pub fn copy_out(
        &self,
        memory: &Memory,
        from: usize,
        host: &Pinned,
        to: usize,
        len: usize,
    ) -> Result<(), Error> {
        self.at("device memory", memory.device())?;
        let (source, target) = (memory.at(from, len)?, host.at(to, len)?);
        // SAFETY: as in `copy_in`.
        let start = || unsafe { call!(cuMemcpyDtoHAsync_v2(target.cast(), source, len, self.0.handle)) };
        if len == 0 { Ok(()) } else { host.copied(self, start) }
    }

    /// Copies `len` bytes of device memory to another place on the device, which does not overlap.
    pub fn copy(
        &self,
        source: &Memory,
        from: usize,
        target: &Memory,
        to: usize,
        len: usize,
    ) -> Result<(), Error> {
        self.at("the source", source.device())?;
        self.at("the target", target.device())?;
        let (source, target) = (source.at(from, len)?, target.at(to, len)?);
        if source.abs_diff(target) < len as u64 {
            return Err(Error::Overlap { len, apart: source.abs_diff(target) });
        }
        if len == 0 {
            return Ok(());
        }
        // SAFETY: both ranges were checked, and do not overlap.
        unsafe { call!(cuMemcpyDtoDAsync_v2(target, source, len, self.0.handle)) }
    }

    /// Sets every byte to zero.
    pub fn zero(&self, memory: &Memory) -> Result<(), Error> {
        self.at("device memory", memory.device())?;
        if memory.is_empty() {
            return Ok(());
        }
        // SAFETY: the whole of live memory.
        unsafe { call!(cuMemsetD8Async(memory.at(0, memory.len())?, 0, memory.len(), self.0.handle)) }
    }

    fn at(&self, what: &'static str, device: &Device) -> Result<(), Error> {
        if !device.is(&self.0.device) {
            let (given, expected) = (device.ordinal(), self.0.device.ordinal());
            return Err(Error::OtherDevice { what, given, expected });
        }
        self.enter()
    }

    fn enter(&self) -> Result<(), Error> {
        self.0.device.enter()
    }
}

impl Event {
    fn new(device: &Device) -> Result<Self, Error> {
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the device's context is current; the place outlives the call.
        unsafe { call!(cuEventCreate(&mut handle, flags))? };
        Ok(Event { device: device.clone(), handle })
    }

    /// Whether what was before it is done.
    pub fn is_done(&self) -> Result<bool, Error> {
        self.device.enter()?;
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.handle) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => super::driver::told("cuEventQuery", other).map(|()| true),
        }
    }

    /// Returns when what was before it is done.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.device.enter()?;
        self.reached()
    }

    /// [`synchronize`](Self::synchronize) for a drop, where the context is current.
    pub(super) fn reached(&self) -> Result<(), Error> {
        // SAFETY: the event lives.
        unsafe { call!(cuEventSynchronize(self.handle)) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; streams that wait for it keep what they need.
        self.device.late(|| unsafe { call!(cuEventDestroy_v2(self.handle)) });
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; work on it goes on to its end.
        self.device.late(|| unsafe { call!(cuStreamDestroy_v2(self.handle)) });
    }
}
