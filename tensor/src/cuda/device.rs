//! A GPU and its primary context.

use super::driver::call;
use super::{Error, probe};
use cudarc::driver::sys;
use std::ffi::CStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// GPU by its primary context, which other libraries of this process share: the same memory, the same errors.
#[derive(Clone, Debug)]
pub struct Device(Arc<DeviceInner>);

#[derive(Debug)]
struct DeviceInner {
    ordinal: usize,
    handle: sys::CUdevice,
    context: sys::CUcontext,
    /// First error of a drop, for the next call.
    late: Mutex<Option<Error>>,
    /// Events without timing that nothing uses any more, as addresses of the driver's handles.
    spare: Mutex<Vec<usize>>,
}

// SAFETY: a context is a handle with the driver's own locking; it is made current in each thread that uses it.
unsafe impl Send for DeviceInner {}
// SAFETY: as above.
unsafe impl Sync for DeviceInner {}

impl Device {
    /// Opens GPU `ordinal` of those that CUDA_VISIBLE_DEVICES leaves visible.
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        let devices = probe()?.devices;
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < devices);
        let number = number.ok_or(Error::Ordinal { ordinal, devices })?;
        let (mut handle, mut context) = (0, std::ptr::null_mut());
        // SAFETY: `probe` has started the driver, and it has this device; the places outlive the calls.
        unsafe {
            call!(cuDeviceGet(&mut handle, number))?;
            call!(cuDevicePrimaryCtxRetain(&mut context, handle))?;
        }
        Ok(Device(Arc::new(DeviceInner {
            ordinal,
            handle,
            context,
            late: Mutex::default(),
            spare: Mutex::default(),
        })))
    }

    /// Ordinal of the device.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// Name of the device.
    pub fn name(&self) -> Result<String, Error> {
        let mut text = [0; 256];
        // SAFETY: the device exists; the driver writes at most `text.len()` bytes, the last of them null.
        unsafe { call!(cuDeviceGetName(text.as_mut_ptr(), text.len() as i32, self.0.handle))? };
        // SAFETY: as above.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Total memory in bytes.
    pub fn memory(&self) -> Result<usize, Error> {
        let mut bytes = 0;
        // SAFETY: the device exists; the place outlives the call.
        unsafe { call!(cuDeviceTotalMem_v2(&mut bytes, self.0.handle))? };
        Ok(bytes)
    }

    /// Free memory in bytes: allocated by no process and by no library of this one.
    pub fn free_memory(&self) -> Result<usize, Error> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the device's context is current; the places outlive the call.
        unsafe { call!(cuMemGetInfo_v2(&mut free, &mut total))? };
        Ok(free)
    }

    /// Number of streaming multiprocessors.
    pub fn multiprocessors(&self) -> Result<u32, Error> {
        self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    /// Highest clock of the multiprocessors in Hz; 0 if the driver does not report it.
    pub fn clock_rate(&self) -> Result<u64, Error> {
        let khz = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?;
        Ok(u64::from(khz) * 1000)
    }

    /// Compute capability: (9, 0) for an H100, which runs machine code for sm_90.
    pub fn capability(&self) -> Result<(u32, u32), Error> {
        let major = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        Ok((major, self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?))
    }

    fn attribute(&self, what: sys::CUdevice_attribute) -> Result<u32, Error> {
        let mut value = 0;
        // SAFETY: the device exists; the place outlives the call.
        unsafe { call!(cuDeviceGetAttribute(&mut value, what, self.0.handle))? };
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Context of its memory and streams.
    pub(super) fn context(&self) -> sys::CUcontext {
        self.0.context
    }

    /// Makes the context current in this thread, and returns the pending error of a drop.
    pub(super) fn enter(&self) -> Result<(), Error> {
        self.make_current()?;
        let late = self.0.late.lock().unwrap_or_else(PoisonError::into_inner).take();
        late.map_or(Ok(()), Err)
    }

    /// Makes the context current in this thread, for libraries that work on the current one.
    pub fn make_current(&self) -> Result<(), Error> {
        // SAFETY: the context is retained for as long as `self` lives.
        unsafe { call!(cuCtxSetCurrent(self.0.context)) }
    }

    /// Keeps this thread's calls from invalidating another thread's capture, as an event query would otherwise do; for watchdog
    /// threads.
    pub fn leave_captures_alone(&self) -> Result<(), Error> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver is loaded; the place for the previous mode outlives the call.
        unsafe { call!(cuThreadExchangeStreamCaptureMode(&mut mode)) }
    }

    /// Returns an event without timing that was used before, if there is one.
    pub(super) fn take_event(&self) -> Option<sys::CUevent> {
        self.spare().pop().map(|address| address as sys::CUevent)
    }

    /// Keeps an event without timing for [`take_event`](Self::take_event).
    ///
    /// The driver's destruction of an event waits for a free of device memory on another thread, and so for the work of all streams;
    /// a thread that watches that work must not wait for it.
    pub(super) fn keep_event(&self, event: sys::CUevent) {
        self.spare().push(event as usize);
    }

    /// Returns the spare events, also after a panic (decision 119): each change is one call of `Vec`.
    fn spare(&self) -> MutexGuard<'_, Vec<usize>> {
        self.0.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the work of a drop and keeps its error for the next call; an earlier error stays.
    pub(super) fn late(&self, work: impl FnOnce() -> Result<(), Error>) {
        if let Err(error) = self.make_current().and_then(|()| work()) {
            let mut late = self.0.late.lock().unwrap_or_else(PoisonError::into_inner);
            late.get_or_insert(error);
        }
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        let spare = std::mem::take(self.spare.get_mut().unwrap_or_else(PoisonError::into_inner));
        if !spare.is_empty() {
            // SAFETY: the context is still retained. No caller is left to receive an error.
            let _ = unsafe { call!(cuCtxSetCurrent(self.context)) };
        }
        for event in spare {
            // SAFETY: made once, destroyed once, here; nothing uses it.
            let _ = unsafe { call!(cuEventDestroy_v2(event as sys::CUevent)) };
        }
        // SAFETY: retained once, in `open`, and released once, here. No caller is left to receive an error.
        let _ = unsafe { call!(cuDevicePrimaryCtxRelease_v2(self.handle)) };
    }
}
