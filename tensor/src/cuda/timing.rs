//! Timing of work by the device's clock.

use super::driver::told;
use super::{Error, Event, Stream, Unavailable, probe};
use cudarc::driver::sys;
use std::sync::OnceLock;

/// Point in a stream's order with its device time.
#[derive(Debug)]
pub struct Moment(Event);

impl Stream {
    /// Records a timed event after all work so far. [`record`](Stream::record) is cheaper.
    pub fn moment(&self) -> Result<Moment, Error> {
        self.mark(sys::CUevent_flags_enum::CU_EVENT_DEFAULT).map(Moment)
    }
}

impl Moment {
    /// Returns the seconds from `earlier`, a moment of the same device, to this one; negative if `earlier` is the later one.
    /// Waits for both.
    pub fn since(&self, earlier: &Moment) -> Result<f64, Error> {
        self.0.synchronize()?;
        earlier.0.synchronize()?;
        let ((_, start), (_, end), mut milliseconds) = (earlier.0.parts(), self.0.parts(), 0.0);
        // SAFETY: both events are live and recorded; the place outlives the call.
        told("cuEventElapsedTime", unsafe { elapsed()?(&mut milliseconds, start, end) })?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// Returns the driver's `cuEventElapsedTime`, which every driver has. cudarc calls a newer name and panics if the driver lacks
/// it.
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
    // The library stays loaded, like the one that `probe` has loaded.
    std::mem::forget(library);
    found
}
