//! Work that is put together once and launched again and again.

use super::driver::call;
use super::{Device, Error, Stream};
use crate::Place;
use cudarc::driver::sys;
use std::sync::{Mutex, PoisonError};

/// Captured work of one stream and of those that joined it, ready to be launched any number of times.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    handle: sys::CUgraphExec,
    /// The driver does not lock graphs.
    launching: Mutex<()>,
}

// SAFETY: a handle of the driver's, used by one thread at a time: a launch holds `launching`, a drop is alone.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Stream {
    /// Makes a graph of what `work` asks of this stream, instead of doing it.
    ///
    /// Work on another stream belongs to it as well, from where that waits for an event recorded here; its end has to be waited
    /// for here before `work` returns. Kernels, copies within the device, zeroing and events can be captured. What the host
    /// takes part in is refused with [`Error::Capturing`]: waits, copies from and to its memory, new buffers, graphs. An error
    /// of `work` ends the capture, and nothing remains of it. Meanwhile no buffer of others' memory may be dropped.
    pub fn capture<E: From<Error>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let capture = Capture::begin(self)?;
        work()?;
        Ok(capture.end()?.ready(self)?)
    }
}

impl Graph {
    /// Does the captured work on `stream`, after all work so far. Launches of one graph come one after the other.
    ///
    /// # Safety
    /// Until the work has ended, the memory that it reads and writes, and the kernels it runs, live, and nobody else touches the
    /// memory: the borrows that the captured calls checked are over.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), Error> {
        let (own, given) = (self.device.ordinal(), stream.device().ordinal());
        if own != given {
            return Err(Error::Elsewhere { given: Place::Cuda(own), ordinal: given });
        }
        stream.outside_graphs("a graph")?;
        let _alone = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: both live and are of one device; no other thread uses the graph.
        unsafe { call!(cuGraphLaunch(self.handle, stream.as_raw().cast())) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; the driver keeps what is under way to its end.
        self.device.late(|| unsafe { call!(cuGraphExecDestroy(self.handle)) });
    }
}

/// A capture under way, discarded when it is dropped.
struct Capture<'a>(&'a Stream);

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, Error> {
        stream.outside_graphs("a capture")?;
        // Other threads may go on as they please, and so may this one with other streams.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives and its context is current.
        unsafe { call!(cuStreamBeginCapture_v2(stream.as_raw().cast(), mode))? };
        Ok(Capture(stream))
    }

    fn end(self) -> Result<Captured, Error> {
        let stream = self.0;
        std::mem::forget(self);
        captured(stream)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        // That it was spoilt is what the caller has been told.
        let _ = captured(self.0);
    }
}

/// What was captured, which is no use yet.
struct Captured(sys::CUgraph);

fn captured(stream: &Stream) -> Result<Captured, Error> {
    let mut graph = Captured(std::ptr::null_mut());
    stream.device().make_current()?;
    // SAFETY: the stream lives; the place outlives the call.
    unsafe { call!(cuStreamEndCapture(stream.as_raw().cast(), &mut graph.0))? };
    Ok(graph)
}

impl Captured {
    fn ready(self, stream: &Stream) -> Result<Graph, Error> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the graph lives; the place outlives the call.
        unsafe { call!(cuGraphInstantiateWithFlags(&mut handle, self.0, 0))? };
        Ok(Graph { device: stream.device().clone(), handle, launching: Mutex::new(()) })
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made once, destroyed once; what was made ready of it needs it no more.
            let _ = unsafe { call!(cuGraphDestroy(self.0)) };
        }
    }
}
