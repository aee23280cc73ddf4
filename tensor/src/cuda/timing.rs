//! How long work takes, by a device's own clock.

use super::driver::told;
use super::{Error, Event, Stream, Unavailable, probe};
use cudarc::driver::sys;
use std::sync::OnceLock;

/// A point in a stream's order whose time the device notes.
#[derive(Debug)]
pub struct Moment(Event);

impl Stream {
    /// The point after all work so far, with its time. [`record`](Stream::record) is cheaper.
    pub fn moment(&self) -> Result<Moment, Error> {
        self.mark(sys::CUevent_flags_enum::CU_EVENT_DEFAULT).map(Moment)
    }
}

impl Moment {
    /// Seconds from `earlier`, a moment of the same device, to this one; negative if it is the later one. Waits for both.
    pub fn since(&self, earlier: &Moment) -> Result<f64, Error> {
        self.0.synchronize()?;
        earlier.0.synchronize()?;
        let ((_, start), (_, end), mut milliseconds) = (earlier.0.parts(), self.0.parts(), 0.0);
        // SAFETY: both events live, and were recorded; the place outlives the call.
        told("cuEventElapsedTime", unsafe { elapsed()?(&mut milliseconds, start, end) })?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// The driver's function. Drivers have had it under this name from the first; cudarc calls a newer name, and panics where a
/// driver does not have that.
fn elapsed() -> Result<Elapsed, Unavailable> {
    static FOUND: OnceLock<Result<Elapsed, Unavailable>> = OnceLock::new();
    FOUND.get_or_init(look).clone()
}

fn look() -> Result<Elapsed, Unavailable> {
    let (library, name) = probe::load()?;
    let function = "cuEventElapsedTime";
    // SAFETY: the type that the driver documents for the function.
    let found = unsafe { library.get::<Elapsed>(function.as_bytes()) }.map(|found| *found);
    let found = found.map_err(|_| Unavailable::NotADriver { library: name, function });
    // It stays, as the one that `probe` has loaded.
    std::mem::forget(library);
    found
}
