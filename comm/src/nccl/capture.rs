//! Operations in CUDA graphs: captured once on every rank, launched many times, each launch watched.

use super::communicator::Nccl;
use super::core::{Core, device_error};
use super::launch::{Patience, called};
use super::ledger::Events;
use crate::communicator::in_flight::Tickets;
use crate::sync::real::Mutex;
use crate::{Action, Called, Error, InFlight, Op};
use meshstep_tensor::cuda::{self, Event, Graph, Stream};
use meshstep_tensor::{Buffer, Place, Queue};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Captured work of a stream, including operations of a communicator.
///
/// When the communicator is dropped, its graphs are dropped first, and when it fails, during the abort: NCCL ends only after them.
///
/// ```no_run
/// use meshstep_comm::nccl::{self, Ability, Captured, Exchange, FoundLibrary, Job, LastResort, Nccl, Options, Unavailable, UniqueId};
/// use meshstep_tensor::cuda::Stream;
/// use std::sync::Arc;
///
/// let found: Result<FoundLibrary, Unavailable> = nccl::probe();
/// println!("non-blocking: {}", found?.abilities.contains(&Ability::NonBlocking));
/// let id = UniqueId::new()?; // for `nccl::init`, where a program meets by other means
/// assert_eq!(UniqueId::from_bytes(*id.as_bytes()).as_bytes(), id.as_bytes());
///
/// let elsewhere: Option<Arc<dyn Exchange>> = None; // a job's own store serves
/// let last_resort = LastResort::new(|error| {
///     eprintln!("{error}");
///     std::process::abort()
/// });
/// let job = Job::from_env(Options { exchange: elsewhere, last_resort, ..Options::default() })?; // under torchrun or srun
/// let comm: Nccl = job.communicator()?;
/// let stream = Stream::new(job.device())?;
/// let step: Captured = comm.capture(&stream, || Ok::<(), meshstep_comm::Error>(()))?; // a whole step
/// // SAFETY: nothing was captured.
/// unsafe { step.launch(&stream)? };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Captured {
    core: Arc<Core>,
    graph: Arc<CapturedBuffers>,
    /// Calls of each launch, and the deadline of all of them together.
    calls: Vec<Called>,
    within: Duration,
    _buffers: Vec<Arc<Ticket>>,
}

/// A graph, until it is dropped.
#[derive(Debug)]
struct CapturedBuffers(Mutex<Option<Graph>>);

/// Captures of a communicator.
#[derive(Debug, Default)]
pub(super) struct Captures {
    /// The capture in progress, if any.
    current: Option<Current>,
    graphs: Vec<Weak<CapturedBuffers>>,
}

#[derive(Debug, Default)]
struct Current {
    calls: Vec<Called>,
    within: Duration,
    tickets: Vec<Arc<Ticket>>,
    /// Error of NCCL during the capture. Ending the communicators waits for the end of the capture, so it comes after that.
    broken: Option<Error>,
}

/// A captured operation: its buffer, and the event behind it.
#[derive(Debug)]
struct Ticket {
    /// Empty once it was given back; the graph keeps the allocation.
    buffer: Mutex<Buffer>,
    end: Arc<Event>,
}

impl Nccl {
    /// Captures the work that `work` enqueues on `stream` into a graph, instead of running it, including operations of this
    /// communicator that start with a queue of that stream. [`InFlight::wait`] gives their buffers back at once.
    ///
    /// Every rank captures the same operations and launches the graph as often as the others, like a collective. The errors of
    /// [`Stream::capture`] apply; `all_to_all` is refused as well, because it sends from a copy that does not stay, and so are
    /// operations in a capture that was not started here. With [`Options::check`](super::Options::check) ranks compare the
    /// captured calls after the capture. A call that fails in NCCL ends the communicators once the capture is over, like any
    /// other failure.
    pub fn capture<E: From<Error>>(
        &self,
        stream: &Stream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Captured, E> {
        self.core().capture(stream, work)
    }
}

impl Captured {
    /// Launches the graph after the work on `stream` so far, and makes `stream` wait for its end. Does not block the host.
    ///
    /// The operations behave as if they were started one by one: they have numbers and entries in the flight record. The deadline
    /// of the whole graph is the longest of their deadlines.
    ///
    /// # Safety
    /// As for [`Graph::launch`]: the memory that the graph reads and writes lives until the work has ended, and no other code
    /// accesses it.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), Error> {
        let core = &*self.core;
        let _turn = core.turn();
        core.ledger().refuse()?;
        let place = |stream: &Stream| Place::Cuda(stream.device().ordinal());
        place(stream).check(place(&core.stream))?;
        core.outside_captures(stream)?;
        let held = self.graph.0.lock();
        let graph = held.as_ref().ok_or(Error::Aborted { rank: core.rank })?;
        core.line_up(&Queue::cuda(stream.clone()))?;
        let first = core.number(self.calls.iter().copied())?;
        let launched = || -> Result<Events, cuda::Error> {
            let begin = Arc::new(core.stream.record()?);
            // SAFETY: the caller's guarantee.
            unsafe { graph.launch(&core.stream)? };
            Ok(Events { begin, end: Arc::new(core.stream.record()?) })
        };
        let launched = launched();
        // The lock is released here: ending the communicator takes it to drop the graph.
        drop(held);
        // A failed launch ends the communicator: the other ranks wait for this one's part.
        let events = launched.map_err(|error| core.broke(device_error(error)))?;
        stream.wait(&events.end).map_err(device_error)?;
        let numbered = (first..).zip(&self.calls);
        let calls = numbered.map(|(op_number, &call)| Called { op_number, ..call });
        core.ledger().watch(calls, &events, self.within);
        Ok(())
    }
}

impl Core {
    fn capture<E: From<Error>>(
        self: &Arc<Self>,
        stream: &Stream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Captured, E> {
        self.ledger().refuse()?;
        self.begin_capture()?;
        let graph = stream.capture(|| work().map_err(CaptureReport::Work));
        let current = self.captures.lock().current.take().unwrap_or_default();
        let Current { calls, within, tickets, broken } = current;
        if let Some(error) = broken {
            drop(graph);
            return Err(self.broke(error).into());
        }
        let graph = Arc::new(CapturedBuffers(Mutex::new(Some(graph.map_err(CaptureReport::into_error)?))));
        let mut captures = self.captures.lock();
        captures.graphs.retain(|graph| graph.strong_count() > 0);
        captures.graphs.push(Arc::downgrade(&graph));
        drop(captures);
        // A failure in between found no graph to drop: this check drops the new one.
        self.ledger().refuse()?;
        if self.options.check {
            self.compare_all(&calls)?;
        }
        Ok(Captured { core: Arc::clone(self), graph, calls, within, _buffers: tickets })
    }

    fn begin_capture(&self) -> Result<(), Error> {
        let mut captures = self.captures.lock();
        if captures.current.is_some() {
            return Err(capturing("a second capture of one communicator"));
        }
        captures.current = Some(Current::default());
        Ok(())
    }

    fn compare_all(&self, calls: &[Called]) -> Result<(), Error> {
        let _turn = self.turn();
        calls
            .iter()
            .try_for_each(|&called| self.compare_one(Patience { called, within: self.options.deadline }))
    }

    pub(super) fn outside_captures(&self, stream: &Stream) -> Result<(), Error> {
        let is = self.captures.lock().current.is_some() || stream.is_capturing().map_err(device_error)?;
        if is { Err(capturing("a launch of captured operations")) } else { Ok(()) }
    }

    /// Adds calls to the capture that `after` belongs to, several as one group of NCCL's. It launches nothing, and so takes no
    /// launch lock: the holder of that lock may be ending the communicators, which waits for captures.
    pub(super) fn start_captured<const N: usize>(
        &self,
        calls: [(Op, Buffer); N],
        after: &Queue,
    ) -> Result<[InFlight; N], ([Buffer; N], Error)> {
        let put = self.put_captured(&calls, after);
        let buffers = calls.map(|(_, buffer)| buffer);
        match put {
            Ok(end) => Ok(buffers.map(|buffer| self.ticket(buffer, Arc::clone(&end)))),
            Err(error) => Err((buffers, error)),
        }
    }

    /// Makes NCCL add the calls to the captured stream. Returns the event behind them.
    fn put_captured(&self, calls: &[(Op, Buffer)], after: &Queue) -> Result<Arc<Event>, Error> {
        calls.iter().try_for_each(|(op, buffer)| self.admit(*op, buffer))?;
        self.ledger().refuse()?;
        match &self.captures.lock().current {
            None => return Err(capturing("an operation that was not started in Nccl::capture")),
            Some(Current { broken: Some(error), .. }) => return Err(error.clone()),
            Some(_) => {}
        }
        if calls.iter().any(|(op, _)| op.action() == Action::AllToAll) {
            return Err(capturing("all_to_all"));
        }
        self.line_up(after)?;
        let now = self.ledger().next();
        let said: Vec<_> = calls.iter().map(|call| called(now, call)).collect();
        let within = calls.iter().map(|(op, _)| self.within(*op)).max().unwrap_or_default();
        let token = self.token();
        let issue = |(op, buffer): &(Op, Buffer)| self.describe(op.action(), buffer, token);
        let issues: Vec<_> = calls.iter().map(issue).collect();
        // SAFETY: as in `launch` once the graph is launched; now nothing runs.
        let issued = unsafe { self.issue(&issues, Patience { called: said[0], within }) };
        issued.map_err(|error| self.spoilt(error))?;
        let end = self.stream.record().map_err(device_error)?;
        if let Some(current) = &mut self.captures.lock().current {
            current.calls.extend(said);
            current.within = current.within.max(within);
        }
        Ok(Arc::new(end))
    }

    /// Keeps the error that ends the communicators when the capture is over.
    fn spoilt(&self, error: Error) -> Error {
        if let Some(current) = &mut self.captures.lock().current {
            current.broken.get_or_insert_with(|| error.clone());
        }
        error
    }

    fn ticket(&self, buffer: Buffer, end: Arc<Event>) -> InFlight {
        let ticket = Arc::new(Ticket { buffer: Mutex::new(buffer), end });
        if let Some(current) = &mut self.captures.lock().current {
            current.tickets.push(Arc::clone(&ticket));
        }
        InFlight::new(ticket, 0)
    }

    /// Drops all graphs; launches in flight complete.
    pub(super) fn drop_graphs(&self) {
        let graphs = std::mem::take(&mut self.captures.lock().graphs);
        for graph in graphs.iter().filter_map(Weak::upgrade) {
            drop(graph.0.lock().take());
        }
    }
}

impl Tickets for Ticket {
    fn redeem(&self, _: usize, on: &Queue) -> (Buffer, Result<(), Error>) {
        let waited = match on.stream() {
            Some(stream) => stream.wait(&self.end).map_err(device_error),
            None => Err(capturing("a wait of the host")),
        };
        (self.buffer.lock().take(), waited)
    }

    fn is_done(&self, _: usize) -> bool {
        true
    }

    fn ends_within(&self, _: usize, _: Duration) -> bool {
        true
    }

    /// The graph keeps the buffer, which its launches use.
    fn forget(&self, _: usize) {}
}

/// Error that ended a capture.
enum CaptureReport<E> {
    Work(E),
    Driver(cuda::Error),
}

impl<E> From<cuda::Error> for CaptureReport<E> {
    fn from(error: cuda::Error) -> Self {
        CaptureReport::Driver(error)
    }
}

impl<E: From<Error>> CaptureReport<E> {
    fn into_error(self) -> E {
        match self {
            CaptureReport::Work(error) => error,
            CaptureReport::Driver(error) => device_error(error).into(),
        }
    }
}

fn capturing(what: &'static str) -> Error {
    device_error(cuda::Error::Capturing { what })
}
