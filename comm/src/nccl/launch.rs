//! Launch of operations on a communicator's stream: checked, ordered after the caller's work, passed to NCCL.

use super::core::{Core, NAP, Own, device_error};
use super::issue::{Issue, issue};
use super::ledger::Events;
use super::options::Options;
use super::pace::Pace;
use super::watchdog::{self, Scope};
use crate::{Action, Called, Error, InFlight, Op, Reduction};
use meshstep_tensor::cuda::Event;
use meshstep_tensor::{Buffer, Category, Place, Queue};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Call that is waited for, and its deadline.
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

    /// Starts operations, several as one NCCL group: all of them or none.
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

    /// Puts the calls on the stream; the caller holds the launch lock. Returns the number of the first call and the events around
    /// all.
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
            // SAFETY: the caller keeps the buffers, or gives them back when the stream is done; the copies and the token belong
            // to this communicator and are used on its stream alone; `put` gave each the length that NCCL expects.
            unsafe { self.issue(&issues, patience)? };
            Ok(Events { begin, end: Arc::new(self.stream.record().map_err(device_error)?) })
        });
        issued.map(|events| (first.op_number, events)).map_err(|error| self.broke(error))
    }

    /// Checks a call for errors that need no other rank.
    pub(super) fn admit(&self, op: Op, buffer: &Buffer) -> Result<(), Error> {
        op.check(self.rank, self.world_size, buffer.len(), buffer.dtype())?;
        if op.action().reduction() == Some(Reduction::Pairwise) {
            return Err(Error::NoPairwise);
        }
        self.raw.knows(op.action())?;
        let expected = Place::Cuda(self.device().ordinal());
        if op.action().moves_data() && buffer.place() != expected {
            return Err(meshstep_tensor::Error::Place { given: buffer.place(), expected }.into());
        }
        Ok(())
    }

    /// Orders the stream's next work after the work on `after` so far.
    pub(super) fn line_up(&self, after: &Queue) -> Result<(), Error> {
        let Some(stream) = after.stream() else { return Ok(()) };
        let point = stream.record().map_err(device_error)?;
        self.stream.wait(&point).map_err(device_error)
    }

    /// Assigns the next operation numbers to these calls. Returns the first number.
    pub(super) fn number(&self, mut calls: impl Iterator<Item = Called>) -> Result<u64, Error> {
        static LAUNCHES: AtomicU64 = AtomicU64::new(0);
        let (now, mut ledger) = (self.now(), self.ledger());
        let first = ledger.next();
        calls.try_for_each(|call| ledger.launch(call, LAUNCHES.fetch_add(1, Relaxed), now))?;
        Ok(first)
    }

    /// Address of the element that barriers reduce.
    pub(super) fn token(&self) -> usize {
        self.own.lock().token.as_ref().map_or(0, address)
    }

    /// Makes the send copies of operations, and records the event before them.
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

    /// Passes operations to NCCL, and waits until it has put them on the stream.
    ///
    /// # Safety
    /// As for [`issue`], with this communicator's stream.
    pub(super) unsafe fn issue(&self, issues: &[Issue], patience: Patience) -> Result<(), Error> {
        // SAFETY: the caller's guarantee; the stream lives as long as `self`.
        let done = unsafe { issue(&self.raw, issues, self.stream.as_raw())? };
        if done { Ok(()) } else { self.wait_until(patience, || self.raw.state()) }
    }

    /// Waits on the host until `done`, the deadline, or a failure of the communicator.
    pub(super) fn wait_until(
        &self,
        patience: Patience,
        done: impl Fn() -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let (end, pace) = (self.now().saturating_add(patience.within), Pace::new());
        while !done()? {
            // After a failure the caller gets that failure instead of this error.
            if self.now() >= end || self.ledger().failed() {
                return Err(patience.over());
            }
            pace.pause();
        }
        Ok(())
    }

    /// Waits on the host for the work on the stream.
    pub(super) fn arrived(&self, patience: Patience) -> Result<(), Error> {
        let point = self.stream.record().map_err(device_error)?;
        self.wait_until(patience, || point.is_done().map_err(device_error))
    }

    pub(super) fn within(&self, op: Op) -> Duration {
        op.deadline().unwrap_or(self.options.deadline)
    }

    /// Ends all communicators after a failure. Returns the failure once no operation accesses any buffer.
    pub(super) fn broke(&self, error: Error) -> Error {
        watchdog::trouble(self, error, Scope::Process);
        self.rest();
        self.ledger().tell()
    }

    /// Waits until the stream is empty after an abort.
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

/// Returns true if the queue's work is captured into a graph.
fn is_capturing(queue: &Queue) -> Result<bool, Error> {
    queue.stream().map_or(Ok(false), |stream| stream.is_capturing().map_err(device_error))
}

pub(super) fn called(op_number: u64, (op, buffer): &(Op, Buffer)) -> Called {
    Called { op_number, action: op.action(), len: buffer.len(), dtype: buffer.dtype(), by: None }
}

impl Own {
    /// Copies `buffer` on the communicator's queue and returns the address of the copy, which stays unchanged until that queue's
    /// next work.
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
