//! Streams, and events that other streams wait for.

use super::driver::{call, waited};
use super::memory::Pinned;
use super::{Device, Error};
use crate::{Place, Slice, SliceMut};
use cudarc::driver::sys;
use std::any::Any;
use std::sync::Arc;

/// Queue of work on a device. Work on different streams is ordered only by [`wait`](Stream::wait).
#[derive(Clone, Debug)]
pub struct Stream(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: Device,
    handle: sys::CUstream,
    /// Owner of a foreign stream, which this type never destroys.
    owner: Option<Owner>,
}

/// Keeps an object of another library alive.
pub(crate) type Owner = Box<dyn Any + Send + Sync>;

// SAFETY: a stream is a handle with the driver's own locking; every call makes its context current first.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// Point in a stream's order of work.
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: sys::CUevent,
    timed: bool,
}

// SAFETY: as for streams.
unsafe impl Send for Event {}
// SAFETY: as for streams.
unsafe impl Sync for Event {}

impl Stream {
    /// Creates a stream that does not synchronise with the default stream.
    pub fn new(device: &Device) -> Result<Self, Error> {
        Self::with_priority(device, 0)
    }

    /// Creates a stream of the highest priority, for communication.
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
        Ok(Self::of(device, handle, None))
    }

    pub(super) fn of(device: &Device, handle: sys::CUstream, owner: Option<Owner>) -> Self {
        Stream(Arc::new(Inner { device: device.clone(), handle, owner }))
    }

    /// Device of the stream.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Driver's handle, for kernels and libraries. It is valid as long as this stream or a clone of it lives.
    pub fn as_raw(&self) -> *mut std::ffi::c_void {
        self.0.handle.cast()
    }

    /// Records an event after all work so far.
    pub fn record(&self) -> Result<Event, Error> {
        self.mark(sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING)
    }

    /// Records an event with these flags after all work so far.
    pub(super) fn mark(&self, flags: sys::CUevent_flags_enum) -> Result<Event, Error> {
        self.enter()?;
        let event = Event::new(&self.0.device, flags)?;
        // SAFETY: event and stream are live, on one device.
        unsafe { call!(cuEventRecord(event.handle, self.0.handle))? };
        Ok(event)
    }

    /// Makes later work on this stream start after `event`. Does not block the host.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        self.enter()?;
        // SAFETY: event and stream are live; a stream may wait for events of other devices.
        unsafe { call!(cuStreamWaitEvent(self.0.handle, event.handle, 0)) }
    }

    /// Returns true while work on this stream is captured into a graph, as during [`capture`](Self::capture).
    pub fn is_capturing(&self) -> Result<bool, Error> {
        self.enter()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is live; the place outlives the call.
        unsafe { call!(cuStreamIsCapturing(self.0.handle, &mut status))? };
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Returns an error while the stream is being captured, for operations that cannot be. Asking the driver for such an
    /// operation would invalidate the capture.
    pub(crate) fn outside_graphs(&self, what: &'static str) -> Result<(), Error> {
        if self.is_capturing()? { Err(Error::Capturing { what }) } else { Ok(()) }
    }

    /// Waits until all work so far is done; returns its error.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.outside_graphs("a wait of the host")?;
        waited();
        // SAFETY: the stream is live.
        unsafe { call!(cuStreamSynchronize(self.0.handle)) }
    }

    /// Copies page-locked bytes from byte `from` on into `into`, asynchronously.
    pub fn copy_in(&self, host: &Pinned, from: usize, into: SliceMut<'_>) -> Result<(), Error> {
        let (target, len) = (self.address(into.as_slice())?, into.as_slice().size());
        let source = host.at(from, len)?;
        self.outside_graphs("a copy of pinned memory")?;
        // SAFETY: both ranges were checked. The driver frees device memory only after work that uses it; `host` waits for the
        // copy.
        let start = || unsafe { call!(cuMemcpyHtoDAsync_v2(target, source.cast(), len, self.0.handle)) };
        if len == 0 { Ok(()) } else { host.copied(self, start) }
    }

    /// Copies `from` into page-locked bytes from byte `to` on, asynchronously.
    pub fn copy_out(&self, from: Slice<'_>, host: &Pinned, to: usize) -> Result<(), Error> {
        let (source, len) = (self.address(from)?, from.size());
        let target = host.at(to, len)?;
        self.outside_graphs("a copy to pinned memory")?;
        // SAFETY: as in `copy_in`.
        let start = || unsafe { call!(cuMemcpyDtoHAsync_v2(target.cast(), source, len, self.0.handle)) };
        if len == 0 { Ok(()) } else { host.copied(self, start) }
    }

    /// Copies pageable host bytes into `into`; `bytes` may be reused when the call returns.
    pub(crate) fn upload(&self, bytes: &[u8], into: SliceMut<'_>) -> Result<(), Error> {
        let target = self.address(into.as_slice())?;
        check_len(bytes.len(), into.as_slice().size())?;
        self.outside_graphs("a copy of the host's memory")?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: source and target have `bytes.len()` bytes. The driver copies pageable memory before it returns. Memory that
        // other code has page-locked it may read later; the stream is synchronised while the borrow lasts.
        unsafe { call!(cuMemcpyHtoDAsync_v2(target, bytes.as_ptr().cast(), bytes.len(), self.0.handle))? };
        self.synchronize()
    }

    /// Copies `from` into pageable host bytes; returns when the copy is done.
    pub(crate) fn download(&self, from: Slice<'_>, into: &mut [u8]) -> Result<(), Error> {
        let source = self.address(from)?;
        check_len(from.size(), into.len())?;
        self.outside_graphs("a copy to the host's memory")?;
        if into.is_empty() {
            return self.synchronize();
        }
        // SAFETY: source and target have `into.len()` bytes; the stream is synchronised while the borrow lasts.
        let copied = unsafe {
            call!(cuMemcpyDtoHAsync_v2(into.as_mut_ptr().cast(), source, into.len(), self.0.handle))
        };
        self.synchronize().and(copied)
    }

    /// Copies within the device.
    pub(crate) fn copy(&self, from: Slice<'_>, into: SliceMut<'_>) -> Result<(), Error> {
        let (source, target) = (self.address(from)?, self.address(into.as_slice())?);
        check_len(from.size(), into.as_slice().size())?;
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: source and target have `from.size()` bytes and do not overlap, since `into` is borrowed exclusively.
        unsafe { call!(cuMemcpyDtoDAsync_v2(target, source, from.size(), self.0.handle)) }
    }

    /// Sets every byte to zero.
    pub(crate) fn zero(&self, memory: SliceMut<'_>) -> Result<(), Error> {
        let target = self.address(memory.as_slice())?;
        if memory.is_empty() {
            return Ok(());
        }
        // SAFETY: exactly the bytes of live memory.
        unsafe { call!(cuMemsetD8Async(target, 0, memory.as_slice().size(), self.0.handle)) }
    }

    /// Returns the device address of memory on this stream's device.
    fn address(&self, memory: Slice<'_>) -> Result<sys::CUdeviceptr, Error> {
        let ordinal = self.0.device.ordinal();
        if memory.place() != Place::Cuda(ordinal) {
            return Err(Error::Elsewhere { given: memory.place(), ordinal });
        }
        self.enter()?;
        Ok(memory.address() as sys::CUdeviceptr)
    }

    pub(super) fn enter(&self) -> Result<(), Error> {
        self.0.device.enter()
    }
}

impl PartialEq for Stream {
    /// Returns true if both are the same stream.
    fn eq(&self, other: &Stream) -> bool {
        self.0.handle == other.0.handle && self.0.device.ordinal() == other.0.device.ordinal()
    }
}

impl Eq for Stream {}

fn check_len(given: usize, expected: usize) -> Result<(), Error> {
    if given == expected { Ok(()) } else { Err(Error::WrongLen { given, expected }) }
}

impl Event {
    fn new(device: &Device, flags: sys::CUevent_flags_enum) -> Result<Self, Error> {
        let timed = flags != sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING;
        if !timed && let Some(handle) = device.take_event() {
            return Ok(Event { device: device.clone(), handle, timed });
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: the device's context is current; the place outlives the call.
        unsafe { call!(cuEventCreate(&mut handle, flags as u32))? };
        Ok(Event { device: device.clone(), handle, timed })
    }

    /// Returns true if all work before the event is done.
    pub fn is_done(&self) -> Result<bool, Error> {
        self.device.enter()?;
        // SAFETY: the event is live.
        match unsafe { sys::cuEventQuery(self.handle) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => super::driver::told("cuEventQuery", other).map(|()| true),
        }
    }

    /// Waits until all work before the event is done.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.device.enter()?;
        self.reached()
    }

    /// Device and driver's handle of the event.
    pub(super) fn parts(&self) -> (&Device, sys::CUevent) {
        (&self.device, self.handle)
    }

    /// Like [`synchronize`](Self::synchronize), for a drop, where the context is current.
    pub(super) fn reached(&self) -> Result<(), Error> {
        waited();
        // SAFETY: the event is live.
        unsafe { call!(cuEventSynchronize(self.handle)) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.timed {
            return self.device.keep_event(self.handle);
        }
        // SAFETY: made once, destroyed once; streams that wait for it keep what they need.
        self.device.late(|| unsafe { call!(cuEventDestroy_v2(self.handle)) });
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.owner.is_none() {
            // SAFETY: made once, destroyed once; pending work on it still completes.
            self.device.late(|| unsafe { call!(cuStreamDestroy_v2(self.handle)) });
        }
    }
}
