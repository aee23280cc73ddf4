//! How operations get onto a communicator's stream: checked, lined up behind the caller's work, handed to NCCL.

use super::core::{Core, NAP, Own, device_error};
use super::issue::{Issue, issue};
use super::ledger::Events;
use super::options::Options;
use super::pace::Pace;
use super::watchdog::{self, Scope};
use crate::{Action, Called, Error, InFlight, Op};
use meshstep_tensor::cuda::Event;
use meshstep_tensor::{Buffer, Category, Place, Queue};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// For which call NCCL is waited for, and how long.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) called: Called,
    pub(super) within: Duration,
}

impl Patience {
    fn over(&self) -> Error {
        let Patience { called, within } = *self;
        Error::Stuck { op_number: called.op_number, called: Box::new(called), after: within }
    }
}

impl Core {
    /// Starts one operation.
    pub(super) fn start(
        self: &Arc<Self>,
        op: Op,
        buffer: Buffer,
        after: &Queue,
    ) -> Result<InFlight, (Buffer, Error)> {
        match self.start_group([(op, buffer)], after) {
            Ok([started]) => Ok(started),
            Err(([buffer], error)) => Err((buffer, error)),
        }
    }

    /// Starts operations, several as one group of NCCL's: all of them or none.
    pub(super) fn start_group<const N: usize>(
        self: &Arc<Self>,
        calls: [(Op, Buffer); N],
        after: &Queue,
    ) -> Result<[InFlight; N], ([Buffer; N], Error)> {
        const { assert!(N > 0, "a group has a call") };
        let back = |calls: [(Op, Buffer); N]| calls.map(|(_, buffer)| buffer);
        match is_capturing(after) {
            Ok(false) => {}
            Ok(true) => return self.start_captured(calls, after),
            Err(error) => return Err((back(calls), error)),
        }
        let _turn = self.turn();
        match self.launch(&calls, after) {
            Ok((mut op_number, events)) => Ok(calls.map(|call| {
                let called = called(op_number, &call);
                op_number += 1;
                self.kept(call, called, events.clone())
            })),
            Err(error) => Err((back(calls), error)),
        }
    }

    fn kept(self: &Arc<Self>, (op, buffer): (Op, Buffer), called: Called, events: Events) -> InFlight {
        let ticket = self.ledger().keep(called, buffer, events, self.within(op));
        InFlight::new(Arc::clone(self) as _, ticket)
    }

    /// Puts the calls on the stream, which only whose turn it is may do. Returns the number of the first and the points around all.
    fn launch(&self, calls: &[(Op, Buffer)], after: &Queue) -> Result<(u64, Events), Error> {
        calls.iter().try_for_each(|(op, buffer)| self.admit(*op, buffer))?;
        self.ledger().refuse()?;
        if self.options.check {
            self.compare(calls)?;
        }
        self.line_up(after)?;
        let within = calls.iter().map(|(op, _)| self.within(*op)).max().unwrap_or_default();
        let first = called(self.number(calls.iter().map(|call| called(0, call)))?, &calls[0]);
        let patience = Patience { called: first, within };
        let issued = self.put(calls).and_then(|(issues, begin)| {
            // SAFETY: the caller keeps the buffers, or gives them back when the stream is done; the copies and the token are this
            // communicator's, used on its stream alone; `put` made each as long as NCCL will take it for.
            unsafe { self.issue(&issues, patience)? };
            Ok(Events { begin, end: Arc::new(self.stream.record().map_err(device_error)?) })
        });
        issued.map(|events| (first.op_number, events)).map_err(|error| self.broke(error))
    }

    /// What is wrong whatever the other ranks do, before anybody hears of it.
    pub(super) fn admit(&self, op: Op, buffer: &Buffer) -> Result<(), Error> {
        op.check(self.rank, self.world_size, buffer.len(), buffer.dtype())?;
        self.raw.knows(op.action())?;
        let expected = Place::Cuda(self.device().ordinal());
        if op.action().moves_data() && buffer.place() != expected {
            return Err(meshstep_tensor::Error::Place { given: buffer.place(), expected }.into());
        }
        Ok(())
    }

    /// The stream's next work comes after what is on `after` so far.
    pub(super) fn line_up(&self, after: &Queue) -> Result<(), Error> {
        let Some(stream) = after.stream() else { return Ok(()) };
        let point = stream.record().map_err(device_error)?;
        self.stream.wait(&point).map_err(device_error)
    }

    /// The next operations are these calls, whatever number they have. Returns that of the first.
    pub(super) fn number(&self, mut calls: impl Iterator<Item = Called>) -> Result<u64, Error> {
        static LAUNCHES: AtomicU64 = AtomicU64::new(0);
        let (now, mut ledger) = (self.now(), self.ledger());
        let first = ledger.next();
        calls.try_for_each(|call| ledger.launch(call, LAUNCHES.fetch_add(1, Relaxed), now))?;
        Ok(first)
    }

    /// Where the element is that barriers reduce.
    pub(super) fn token(&self) -> usize {
        self.own.lock().token.as_ref().map_or(0, address)
    }

    /// Makes the copies that operations send from, and the point before them.
    fn put(&self, calls: &[(Op, Buffer)]) -> Result<(Vec<Issue>, Arc<Event>), Error> {
        let begin = Arc::new(self.stream.record().map_err(device_error)?);
        let token = self.token();
        let mut own = self.own.lock();
        let mut copies = 0;
        let mut issues = Vec::with_capacity(calls.len());
        for (op, buffer) in calls {
            let aside = if op.action() == Action::AllToAll {
                copies += 1;
                own.copy(copies - 1, buffer, &self.queue(), &self.options)?
            } else {
                token
            };
            issues.push(self.describe(op.action(), buffer, aside));
        }
        Ok((issues, begin))
    }

    pub(super) fn describe(&self, action: Action, buffer: &Buffer, aside: usize) -> Issue {
        let (rank, world_size, address) = (self.rank, self.world_size, address(buffer));
        Issue { action, rank, world_size, address, len: buffer.len(), dtype: buffer.dtype(), aside }
    }

    /// Hands operations to NCCL, and waits until it has put them on the stream.
    ///
    /// # Safety
    /// As for [`issue`], of this communicator's stream.
    pub(super) unsafe fn issue(&self, issues: &[Issue], patience: Patience) -> Result<(), Error> {
        // SAFETY: as this function's; the stream lives as long as `self`.
        let done = unsafe { issue(&self.raw, issues, self.stream.as_raw())? };
        if done { Ok(()) } else { self.wait_until(patience, || self.raw.state()) }
    }

    /// Waits on the host, unless the communicator fails meanwhile.
    pub(super) fn wait_until(
        &self,
        patience: Patience,
        done: impl Fn() -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let (end, pace) = (self.now().saturating_add(patience.within), Pace::new());
        while !done()? {
            // Of what has failed already the caller is told, whatever error this is.
            if self.now() >= end || self.ledger().failed() {
                return Err(patience.over());
            }
            pace.pause();
        }
        Ok(())
    }

    /// Waits on the host for what is on the stream.
    pub(super) fn arrived(&self, patience: Patience) -> Result<(), Error> {
        let point = self.stream.record().map_err(device_error)?;
        self.wait_until(patience, || point.is_done().map_err(device_error))
    }

    pub(super) fn within(&self, op: Op) -> Duration {
        op.deadline().unwrap_or(self.options.deadline)
    }

    /// Ends everything after a failure. Returns it, once nothing touches any buffer any more.
    pub(super) fn broke(&self, error: Error) -> Error {
        watchdog::trouble(self, error, Scope::Process);
        self.rest();
        self.ledger().tell()
    }

    /// Waits until a stream whose work has been aborted is empty.
    fn rest(&self) {
        let Ok(end) = self.stream.record() else { return };
        let mut errors = 0;
        while errors < 4 {
            match end.is_done() {
                Ok(true) => return,
                Ok(false) => std::thread::sleep(NAP / 20),
                Err(_) => errors += 1,
            }
        }
    }
}

/// Whether the queue's work goes into a graph.
fn is_capturing(queue: &Queue) -> Result<bool, Error> {
    queue.stream().map_or(Ok(false), |stream| stream.is_capturing().map_err(device_error))
}

pub(super) fn called(op_number: u64, (op, buffer): &(Op, Buffer)) -> Called {
    Called { op_number, action: op.action(), len: buffer.len(), dtype: buffer.dtype() }
}

impl Own {
    /// Copies `buffer` on the communicator's queue. Where the copy is; it stays as it is until that queue's next work.
    fn copy(
        &mut self,
        index: usize,
        buffer: &Buffer,
        queue: &Queue,
        options: &Options,
    ) -> Result<usize, Error> {
        let fits = |copy: &Buffer| (copy.len(), copy.dtype()) == (buffer.len(), buffer.dtype());
        if !self.copies.get(index).is_some_and(fits) {
            let copy =
                Buffer::zeroed_on(queue, buffer.len(), buffer.dtype(), &options.meter, Category::Staging)?;
            self.copies.truncate(index);
            self.copies.push(copy);
        }
        queue.copy(buffer.as_slice(), self.copies[index].as_mut())?;
        Ok(address(&self.copies[index]))
    }
}

fn address(buffer: &Buffer) -> usize {
    buffer.as_ptr().addr().get()
}
