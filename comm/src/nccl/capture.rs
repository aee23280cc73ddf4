//! Operations as part of a CUDA graph: captured once on every rank, launched again and again, each time under watch.

use super::communicator::Nccl;
use super::core::{Core, device_error};
use super::launch::{Patience, called};
use super::ledger::Events;
use crate::in_flight::Tickets;
use crate::sync::real::Mutex;
use crate::{Action, Called, Error, InFlight, Op};
use meshstep_tensor::cuda::{self, Event, Graph, Stream};
use meshstep_tensor::{Buffer, Place, Queue};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Captured work of a stream, operations of a communicator among it.
///
/// When the communicator fails or is dropped, its graphs are given up first: NCCL neither ends nor parts before they have gone.
#[derive(Debug)]
pub struct Captured {
    core: Arc<Core>,
    graph: Arc<Held>,
    /// As they are called at each launch, and how long all may take.
    calls: Vec<Called>,
    within: Duration,
    _buffers: Vec<Arc<Ticket>>,
}

/// A graph, until it is given up.
#[derive(Debug)]
struct Held(Mutex<Option<Graph>>);

/// What a communicator has captured.
#[derive(Debug, Default)]
pub(super) struct Captures {
    /// While a capture is under way.
    current: Option<Current>,
    graphs: Vec<Weak<Held>>,
}

#[derive(Debug, Default)]
struct Current {
    calls: Vec<Called>,
    within: Duration,
    tickets: Vec<Arc<Ticket>>,
    /// What NCCL could not put there. Ending it waits for the capture to end, so it comes after that.
    broken: Option<Error>,
}

/// A captured operation: its buffer, and the point behind it.
#[derive(Debug)]
struct Ticket {
    /// Without elements once it was given back; what it was a part of stays for the graph.
    buffer: Mutex<Buffer>,
    end: Arc<Event>,
}

impl Nccl {
    /// Makes a graph of what `work` asks of `stream`, instead of doing it, operations of this communicator among it that are
    /// started after a queue of that stream. [`InFlight::wait`] gives their buffers back at once.
    ///
    /// Every rank captures the same operations, and launches the graph as often as the others: as a collective. What
    /// [`Stream::capture`] refuses is refused, and so is `all_to_all`, which sends from a copy that does not stay; so are
    /// operations in a capture that does not come from here. With [`Options::check`](super::Options::check) ranks compare what
    /// they have captured once it is there. A call that fails in NCCL ends the communicators, as any does, when the capture is
    /// over.
    pub fn capture<E: From<Error>>(
        &self,
        stream: &Stream,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Captured, E> {
        self.core().capture(stream, work)
    }
}

impl Captured {
    /// Does the captured work, after what is on `stream` so far, and has it wait for the end. The host goes on.
    ///
    /// On its way it is as operations started one by one would be: they have numbers, and an entry each in the flight record;
    /// all of it together may take as long as the longest of their deadlines.
    ///
    /// # Safety
    /// As for [`Graph::launch`]: what the graph reads and writes lives until the work has ended, and nobody else touches it.
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
            // SAFETY: the caller's promise.
            unsafe { graph.launch(&core.stream)? };
            Ok(Events { begin, end: Arc::new(core.stream.record()?) })
        };
        let launched = launched();
        // Whoever ends the communicator gives the graph up first.
        drop(held);
        // The other ranks wait for this one's part.
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
        let graph = stream.capture(|| work().map_err(Told::Work));
        let current = self.captures.lock().current.take().unwrap_or_default();
        let Current { calls, within, tickets, broken } = current;
        if let Some(error) = broken {
            drop(graph);
            return Err(self.broke(error).into());
        }
        let graph = Arc::new(Held(Mutex::new(Some(graph.map_err(Told::into_error)?))));
        let mut captures = self.captures.lock();
        captures.graphs.retain(|graph| graph.strong_count() > 0);
        captures.graphs.push(Arc::downgrade(&graph));
        drop(captures);
        // A failure in between has found no graph to give up: this one is dropped here.
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

    /// Puts calls into the capture that `after` belongs to, several as one group of NCCL's. It launches nothing, and so needs no
    /// turn: whoever has that may be ending the communicators, which waits for captures.
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

    /// Has NCCL put the calls on the captured stream. The point behind them.
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
        // SAFETY: as in `launch`, where launching the graph is concerned; now nothing is done.
        let issued = unsafe { self.issue(&issues, Patience { called: said[0], within }) };
        issued.map_err(|error| self.spoilt(error))?;
        let end = self.stream.record().map_err(device_error)?;
        if let Some(current) = &mut self.captures.lock().current {
            current.calls.extend(said);
            current.within = current.within.max(within);
        }
        Ok(Arc::new(end))
    }

    /// Keeps what ends the communicators when the capture is over.
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

    /// Gives up all graphs: those under way go on to their end.
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

    /// The graph keeps the buffer, which its launches work on.
    fn forget(&self, _: usize) {}
}

/// What a capture was ended by.
enum Told<E> {
    Work(E),
    Driver(cuda::Error),
}

impl<E> From<cuda::Error> for Told<E> {
    fn from(error: cuda::Error) -> Self {
        Told::Driver(error)
    }
}

impl<E: From<Error>> Told<E> {
    fn into_error(self) -> E {
        match self {
            Told::Work(error) => error,
            Told::Driver(error) => device_error(error).into(),
        }
    }
}

fn capturing(what: &'static str) -> Error {
    device_error(cuda::Error::Capturing { what })
}
