//! A GPU and its primary context.

use super::driver::call;
use super::{Error, probe};
use cudarc::driver::sys;
use std::ffi::CStr;
use std::sync::{Arc, Mutex, PoisonError};

/// A GPU, by its primary context: what other libraries of this process put there is the same memory, the same errors.
#[derive(Clone, Debug)]
pub struct Device(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    ordinal: usize,
    handle: sys::CUdevice,
    context: sys::CUcontext,
    /// What a drop could not do.
    late: Mutex<Option<Error>>,
}

// SAFETY: a context is a handle that the driver locks by itself; it is made current in each thread that uses it.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Device {
    /// GPU `ordinal`, as the driver counts those that CUDA_VISIBLE_DEVICES leaves.
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        let devices = probe()?.devices;
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < devices);
        let number = number.ok_or(Error::Ordinal { ordinal, devices })?;
        let (mut handle, mut context) = (0, std::ptr::null_mut());
        // SAFETY: there is a driver, which `probe` has started, and it has this device; the places outlive the calls.
        unsafe {
            call!(cuDeviceGet(&mut handle, number))?;
            call!(cuDevicePrimaryCtxRetain(&mut context, handle))?;
        }
        Ok(Device(Arc::new(Inner { ordinal, handle, context, late: Mutex::new(None) })))
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// Its name.
    pub fn name(&self) -> Result<String, Error> {
        let mut text = [0; 256];
        // SAFETY: the device exists; the driver writes at most so many bytes, the last of them an end.
        unsafe { call!(cuDeviceGetName(text.as_mut_ptr(), text.len() as i32, self.0.handle))? };
        // SAFETY: as above.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Bytes of its memory.
    pub fn memory(&self) -> Result<usize, Error> {
        let mut bytes = 0;
        // SAFETY: the device exists; the place outlives the call.
        unsafe { call!(cuDeviceTotalMem_v2(&mut bytes, self.0.handle))? };
        Ok(bytes)
    }

    /// Bytes of its memory that nobody has taken: no process, and no library of this one.
    pub fn free_memory(&self) -> Result<usize, Error> {
        self.make_current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the device's context is current; the places outlive the call.
        unsafe { call!(cuMemGetInfo_v2(&mut free, &mut total))? };
        Ok(free)
    }

    /// Its streaming multiprocessors.
    pub fn multiprocessors(&self) -> Result<u32, Error> {
        self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    /// The highest clock of its multiprocessors in Hz; 0 where the driver does not tell.
    pub fn clock_rate(&self) -> Result<u64, Error> {
        let khz = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?;
        Ok(u64::from(khz) * 1000)
    }

    /// Its compute capability: (9, 0) of an H100, whose machine code is for sm_90.
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

    /// The context that its memory and streams belong to.
    pub(super) fn context(&self) -> sys::CUcontext {
        self.0.context
    }

    /// Makes the context this thread's, and tells what a drop could not do.
    pub(super) fn enter(&self) -> Result<(), Error> {
        self.make_current()?;
        let late = self.0.late.lock().unwrap_or_else(PoisonError::into_inner).take();
        late.map_or(Ok(()), Err)
    }

    /// Makes its context this thread's, for libraries that work on the current one.
    pub fn make_current(&self) -> Result<(), Error> {
        // SAFETY: the context is retained for as long as `self` lives.
        unsafe { call!(cuCtxSetCurrent(self.0.context)) }
    }

    /// This thread's calls no longer spoil a graph that another thread captures, as a look at an event would: for threads
    /// that watch.
    pub fn leave_captures_alone(&self) -> Result<(), Error> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: there is a driver; the place for the mode before outlives the call.
        unsafe { call!(cuThreadExchangeStreamCaptureMode(&mut mode)) }
    }

    /// Runs what a drop has to do; its error is for the next call, and the first one stays.
    pub(super) fn late(&self, work: impl FnOnce() -> Result<(), Error>) {
        if let Err(error) = self.make_current().and_then(|()| work()) {
            let mut late = self.0.late.lock().unwrap_or_else(PoisonError::into_inner);
            late.get_or_insert(error);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: retained once, in `open`, and released once, here. There is nobody left to tell of an error.
        let _ = unsafe { call!(cuDevicePrimaryCtxRelease_v2(self.handle)) };
    }
}
