//! Driver functions with their results as values.

use super::Error;
use cudarc::driver::sys;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Calls a function of the driver. [`probe`](super::probe) must have found a driver before: cudarc panics without one.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::cuda::driver::told(stringify!($function), cudarc::driver::sys::$function($($argument),*))
    };
}
pub(super) use call;

static WAITS: AtomicU64 = AtomicU64::new(0);

/// Number of host waits of this process: for a stream, for an event, or for a free of memory, which waits for its device.
pub fn waits() -> u64 {
    WAITS.load(Relaxed)
}

/// Counts one wait of the host.
pub(super) fn waited() {
    WAITS.fetch_add(1, Relaxed);
}

/// Converts the result of a call to a [`Result`].
pub(super) fn told(call: &'static str, result: sys::CUresult) -> Result<(), Error> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        | sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        | sys::CUresult::CUDA_ERROR_CAPTURED_EVENT => Err(Error::Capturing { what: call }),
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED => Err(Error::Unjoined),
        other => Err(Error::Call { call, code: other as u32, name: name(other) }),
    }
}

fn name(result: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the result came from the driver, so the driver is loaded; `text` is a valid place for a pointer.
    let known = unsafe { sys::cuGetErrorName(result, &mut text) };
    if known != sys::CUresult::CUDA_SUCCESS || text.is_null() {
        return "an unknown error".to_owned();
    }
    // SAFETY: the driver's names are constant strings that end in a null byte.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
