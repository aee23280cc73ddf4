//! CUDA graphs: work captured once and launched many times.

use super::driver::call;
use super::{Device, Error, Stream};
use crate::Place;
use cudarc::driver::sys;
use std::sync::{Mutex, PoisonError};

/// Captured work of one stream and of the streams that joined it.
///
/// ```no_run
/// use meshstep_tensor::cuda::{self, Device, Driver, Event, Footprint, Function, Graph, Letter, Mail, Module, Moment, Stream, Unavailable};
/// use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
///
/// let found: Result<&Driver, Unavailable> = cuda::probe();
/// println!("{} GPUs", found?.devices);
/// let (device, meter) = (Device::open(0)?, Meter::new());
/// let (stream, other) = (Stream::new(&device)?, Stream::new(&device)?);
/// let module = Module::load(&device, ".version 8.0 .target sm_80 .address_size 64 .visible .entry nothing() { ret; }")?;
/// let nothing: Function = module.function("nothing")?;
/// let Footprint { registers, .. } = nothing.footprint(256)?;
/// println!("{registers} registers");
///
/// // Work that is recorded once, and launched as a whole.
/// // SAFETY: the kernel has no parameters and accesses no memory.
/// let graph: Graph = stream.capture(|| unsafe { stream.launch(&nothing, (1, 256), &mut []) })?;
/// let start: Moment = stream.moment()?;
/// // SAFETY: as above.
/// unsafe { graph.launch(&stream)? };
/// println!("{} s", stream.moment()?.since(&start)?);
/// let launched: Event = stream.record()?;
/// other.wait(&launched)?;
///
/// // Eight bytes to the host, which does not wait until it reads them.
/// let words = Buffer::zeroed_on(&Queue::cuda(other.clone()), 1, DType::U64, &meter, Category::Staging)?;
/// let mail = Mail::new(&device, 8, &meter);
/// let letter: Letter = mail.fetch(&other, words.as_slice())?;
/// let mut bytes = [0; 8];
/// letter.read(&mut bytes)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Graph {
    device: Device,
    handle: sys::CUgraphExec,
    /// Launch lock: the driver does not lock graphs.
    launching: Mutex<()>,
}

// SAFETY: a driver handle used by one thread at a time: a launch holds `launching`, and a drop has exclusive access.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Stream {
    /// Captures the work that `work` enqueues on this stream into a graph, instead of running it.
    ///
    /// Work on another stream is captured as well from where that stream waits for an event recorded here; this stream must wait
    /// for its end before `work` returns. Kernels, copies within the device, zeroing and events can be captured. Operations that
    /// involve the host fail with [`Error::Capturing`]: waits, copies from and to host memory, new buffers, graphs. An error of
    /// `work` ends the capture and discards it. Do not drop a buffer over another library's memory during a capture.
    pub fn capture<E: From<Error>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let capture = Capture::begin(self)?;
        work()?;
        Ok(capture.end()?.ready(self)?)
    }
}

impl Graph {
    /// Launches the graph on `stream`, after all work so far. Launches of one graph run one after the other.
    ///
    /// # Safety
    /// Until the work has ended, the memory that it reads and writes and the kernels that it runs stay alive, and no other code
    /// accesses the memory: the borrows that the captured calls checked are over.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), Error> {
        let (own, given) = (self.device.ordinal(), stream.device().ordinal());
        if own != given {
            return Err(Error::Elsewhere { given: Place::Cuda(own), ordinal: given });
        }
        stream.outside_graphs("a graph")?;
        let _alone = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: graph and stream are live and of one device; no other thread uses the graph.
        unsafe { call!(cuGraphLaunch(self.handle, stream.as_raw().cast())) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; the driver finishes launches in flight.
        self.device.late(|| unsafe { call!(cuGraphExecDestroy(self.handle)) });
    }
}

/// Capture in progress, discarded on drop.
struct Capture<'a>(&'a Stream);

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Self, Error> {
        stream.outside_graphs("a capture")?;
        // In relaxed mode other threads, and this one on other streams, may call the driver without restriction.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is live and its context is current.
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
        // The caller already has the error that ended the capture.
        let _ = captured(self.0);
    }
}

/// Captured graph before its instantiation.
struct Captured(sys::CUgraph);

fn captured(stream: &Stream) -> Result<Captured, Error> {
    let mut graph = Captured(std::ptr::null_mut());
    stream.device().make_current()?;
    // SAFETY: the stream is live; the place outlives the call.
    unsafe { call!(cuStreamEndCapture(stream.as_raw().cast(), &mut graph.0))? };
    Ok(graph)
}

impl Captured {
    fn ready(self, stream: &Stream) -> Result<Graph, Error> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the graph is live; the place outlives the call.
        unsafe { call!(cuGraphInstantiateWithFlags(&mut handle, self.0, 0))? };
        Ok(Graph { device: stream.device().clone(), handle, launching: Mutex::new(()) })
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made once, destroyed once; the executable instantiated from it does not need it.
            let _ = unsafe { call!(cuGraphDestroy(self.0)) };
        }
    }
}
