//! A rank's operations in flight: buffers until they are collected, and events until they are reached.

use super::recorder::Recorder;
use crate::{Called, Error, Stats};
use meshstep_tensor::Buffer;
use meshstep_tensor::cuda::{self, Event};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Initial capacity for operations in flight.
const ROOM: usize = 64;

#[derive(Debug)]
pub(super) struct Ledger {
    rank: usize,
    world_size: usize,
    slots: Vec<LedgerSlot>,
    free: Vec<usize>,
    running: VecDeque<Running>,
    started: u64,
    failed: Option<Arc<Error>>,
    /// True once the caller has received the failure itself.
    told: bool,
    /// Number of consecutive queries that the device answered with an error.
    mute: u32,
    stats: Stats,
    recorder: Recorder,
    /// Buffers of forgotten operations that have ended.
    released: Vec<Buffer>,
}

/// Buffer of one operation, until it is given back.
#[derive(Debug)]
struct LedgerSlot {
    buffer: Option<Buffer>,
    /// Success of the operation, once it has ended.
    ended: Option<bool>,
}

/// A launched operation, in the order of the communicator's stream.
#[derive(Debug)]
struct Running {
    called: Called,
    /// Ticket, unless it was given up.
    slot: Option<usize>,
    /// Buffer of a given-up ticket.
    held: Option<Buffer>,
    events: Events,
    within: Duration,
    began: Option<Duration>,
}

/// Events on the communicator's stream before and after an operation, or a group of them.
#[derive(Clone, Debug)]
pub(super) struct Events {
    pub(super) begin: Arc<Event>,
    pub(super) end: Arc<Event>,
}

/// An operation past its deadline.
pub(super) struct Late {
    pub(super) called: Called,
    pub(super) after: Duration,
}

impl Ledger {
    pub(super) fn new(rank: usize, world_size: usize) -> Self {
        Ledger {
            rank,
            world_size,
            slots: Vec::with_capacity(ROOM),
            free: Vec::with_capacity(ROOM),
            running: VecDeque::with_capacity(ROOM),
            started: 0,
            failed: None,
            told: false,
            mute: 0,
            stats: Stats::default(),
            recorder: Recorder::new(),
            released: Vec::new(),
        }
    }

    /// Returns the failure, if there was one: no operation starts after it.
    pub(super) fn refuse(&mut self) -> Result<(), Error> {
        if self.failed.is_some() { Err(self.tell()) } else { Ok(()) }
    }

    /// Assigns the next operation number to this call and records its launch.
    pub(super) fn launch(&mut self, call: Called, launch: u64, now: Duration) -> Result<(), Error> {
        self.refuse()?;
        self.recorder.launched(Called { op_number: self.started, ..call }, launch, now);
        self.started += 1;
        Ok(())
    }

    /// Number of the next operation.
    pub(super) fn next(&self) -> u64 {
        self.started
    }

    /// Keeps a launched operation and its buffer. Returns its ticket.
    pub(super) fn keep(&mut self, called: Called, buffer: Buffer, events: Events, within: Duration) -> usize {
        let slot = LedgerSlot { buffer: Some(buffer), ended: None };
        let ticket = self.free.pop().unwrap_or(self.slots.len());
        match self.slots.get_mut(ticket) {
            Some(old) => *old = slot,
            None => self.slots.push(slot),
        }
        let slot = Some(ticket);
        self.running.push_back(Running { called, slot, held: None, events, within, began: None });
        ticket
    }

    /// Watches launched operations of a graph, which keeps their buffers itself.
    pub(super) fn watch(&mut self, calls: impl Iterator<Item = Called>, events: &Events, within: Duration) {
        let running =
            |called| Running { called, slot: None, held: None, events: events.clone(), within, began: None };
        self.running.extend(calls.map(running));
    }

    /// Counts a successful operation.
    pub(super) fn done(&mut self, called: Called, now: Duration) {
        let Called { op_number, action, len, dtype, .. } = called;
        self.stats.count(action, self.rank, self.world_size, len, dtype.size());
        self.recorder.ended(op_number, now);
    }

    /// Updates the operations that have begun or ended by now. An error is the device's.
    pub(super) fn look(&mut self, now: Duration) -> Result<(), cuda::Error> {
        let looked = self.try_look(now);
        self.mute = if looked.is_err() { self.mute.saturating_add(1) } else { 0 };
        // After a failure, a device that only returns errors no longer runs anything.
        if self.mute > 3 && self.failed.is_some() {
            while let Some(lost) = self.running.pop_front() {
                self.end(lost, now);
            }
        }
        looked
    }

    fn try_look(&mut self, now: Duration) -> Result<(), cuda::Error> {
        while let Some(first) = self.running.front_mut() {
            if first.began.is_none() {
                if !first.events.begin.is_done()? {
                    break;
                }
                first.began = Some(now);
                self.recorder.began(first.called.op_number, now);
            }
            if !first.events.end.is_done()? {
                break;
            }
            let Some(first) = self.running.pop_front() else { break };
            self.end(first, now);
        }
        Ok(())
    }

    fn end(&mut self, run: Running, now: Duration) {
        if self.failed.is_none() {
            self.done(run.called, now);
        }
        self.released.extend(run.held);
        if let Some(slot) = run.slot {
            self.slots[slot].ended = Some(self.failed.is_none());
        }
    }

    /// Returns the first operation on the stream, if it is past its deadline.
    pub(super) fn late(&self, now: Duration) -> Option<Late> {
        let first = self.running.front()?;
        let over = first.began? + first.within <= now;
        over.then_some(Late { called: first.called, after: first.within })
    }

    /// Records a failure. Returns true if it is the first.
    pub(super) fn fail(&mut self, cause: &Arc<Error>) -> bool {
        let first = self.failed.is_none();
        self.failed.get_or_insert_with(|| Arc::clone(cause));
        first
    }

    pub(super) fn failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Returns the failure: the first time itself, later as [`Error::Poisoned`].
    pub(super) fn tell(&mut self) -> Error {
        let Some(cause) = &self.failed else { return Error::Aborted { rank: self.rank } };
        match std::mem::replace(&mut self.told, true) {
            false => Error::clone(cause),
            true => Error::Poisoned { cause: Arc::clone(cause) },
        }
    }

    /// Returns true if no operation runs.
    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    pub(super) fn has_ended(&self, ticket: usize) -> bool {
        self.slots[ticket].ended.is_some()
    }

    /// Returns the buffer and the result of an ended operation.
    pub(super) fn collect(&mut self, ticket: usize) -> Option<(Buffer, Result<(), Error>)> {
        let well = self.slots[ticket].ended?;
        let buffer = self.vacate(ticket)?;
        Some((buffer, if well { Ok(()) } else { Err(self.tell()) }))
    }

    /// Returns the event at the end of a running operation.
    pub(super) fn end_of(&self, ticket: usize) -> Option<Arc<Event>> {
        self.running.iter().find(|run| run.slot == Some(ticket)).map(|run| Arc::clone(&run.events.end))
    }

    /// Returns the buffer of an operation that may still run.
    pub(super) fn part(&mut self, ticket: usize) -> Option<Buffer> {
        self.let_go(ticket);
        self.vacate(ticket)
    }

    /// Forgets an operation. Its buffer is kept while it runs; if it has ended, the buffer is returned.
    pub(super) fn forget(&mut self, ticket: usize) -> Option<Buffer> {
        let run = self.let_go(ticket);
        let buffer = self.vacate(ticket);
        match run {
            Some(run) => {
                self.running[run].held = buffer;
                None
            }
            None => buffer,
        }
    }

    /// Detaches the ticket from its running operation and returns the operation's index.
    fn let_go(&mut self, ticket: usize) -> Option<usize> {
        let run = self.running.iter().position(|run| run.slot == Some(ticket))?;
        self.running[run].slot = None;
        Some(run)
    }

    fn vacate(&mut self, ticket: usize) -> Option<Buffer> {
        let buffer = self.slots[ticket].buffer.take()?;
        self.free.push(ticket);
        Some(buffer)
    }

    /// Returns the buffers to drop without the lock: freeing memory waits for the device.
    pub(super) fn released(&mut self) -> Vec<Buffer> {
        std::mem::take(&mut self.released)
    }

    pub(super) fn stats(&self) -> Stats {
        self.stats
    }

    pub(super) fn record(&self) -> String {
        self.recorder.text()
    }
}
