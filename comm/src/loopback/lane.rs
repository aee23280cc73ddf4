//! One rank's queue of operations, and where their buffers stay until they are waited for.

use super::meeting::Seat;
use super::shared::View;
use crate::clock::Wake;
use crate::sync::{Condvar, Mutex};
use crate::{Called, Clock, Error, Op, Stats};
use meshstep_tensor::{Buffer, Place};
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Operations in flight for which room is made at the start; more of them grow it once.
const ROOM: usize = 64;

/// Between the callers of a rank and its communication thread: each carries out what is next when nobody else does.
#[derive(Debug)]
pub(super) struct Lane {
    rank: usize,
    world_size: usize,
    clock: Clock,
    state: Mutex<State>,
    /// There is something to do, or nothing will come any more.
    work: Condvar,
    /// An operation has ended.
    ended: Condvar,
}

#[derive(Debug)]
struct State {
    slots: Vec<Slot>,
    free: Vec<usize>,
    queue: VecDeque<usize>,
    /// An operation is being carried out. They are carried out one at a time.
    busy: bool,
    started: u64,
    closed: bool,
    /// The failure this rank has been told of.
    told: Option<Arc<Error>>,
    stats: Stats,
}

/// Room for one operation: taken by `enqueue`, given back by `collect` or, if forgotten, by `finish`.
#[derive(Debug)]
struct Slot {
    task: Task,
    buffer: Option<Buffer>,
    result: Option<Result<(), Error>>,
    formed: Option<Seat>,
    forgotten: bool,
}

/// An operation, as its carrying out needs it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub(super) slot: usize,
    pub(super) op: Op,
    pub(super) called: Called,
    pub(super) view: View,
}

impl Lane {
    pub(super) fn new(rank: usize, world_size: usize, clock: &Clock) -> Arc<Self> {
        let state = State {
            slots: Vec::with_capacity(ROOM),
            free: Vec::with_capacity(ROOM),
            queue: VecDeque::with_capacity(ROOM),
            busy: false,
            started: 0,
            closed: false,
            told: None,
            stats: Stats::default(),
        };
        let (state, work, ended) = (Mutex::new(state), Condvar::new(), Condvar::new());
        let lane = Arc::new(Lane { rank, world_size, clock: clock.clone(), state, work, ended });
        let weak: Weak<Lane> = Arc::downgrade(&lane);
        clock.register(weak);
        lane
    }

    /// Takes an operation in, or gives the buffer back with the reason why not. `waits`: the caller waits for it at once, and
    /// threads that wait carry operations out, so that the communication thread is not woken.
    pub(super) fn enqueue(&self, op: Op, buffer: Buffer, waits: bool) -> Result<usize, (Buffer, Error)> {
        if let Err(error) = op.check(self.rank, self.world_size, buffer.len(), buffer.dtype()) {
            return Err((buffer, error));
        }
        // Ranks are threads: they read one another's memory themselves.
        if buffer.place() != Place::Cpu {
            let elsewhere = meshstep_tensor::Error::Place { given: buffer.place(), expected: Place::Cpu };
            return Err((buffer, elsewhere.into()));
        }
        let mut state = self.state.lock();
        if let Err(error) = state.refuse(self.rank) {
            return Err((buffer, error));
        }
        let called = Called {
            op_number: state.started,
            action: op.action(),
            len: buffer.len(),
            dtype: buffer.dtype(),
        };
        state.started += 1;
        let view = View::of(&buffer, op.action());
        let ticket = state.place(|slot| Task { slot, op, called, view }, buffer);
        state.queue.push_back(ticket);
        drop(state);
        if !waits {
            self.work.notify_all();
        }
        Ok(ticket)
    }

    /// The next operation, or none when the rank has left and everything it started is done.
    pub(super) fn next(&self) -> Option<Task> {
        let mut state = self.state.lock();
        loop {
            if let Some(task) = state.take() {
                return Some(task);
            }
            if state.closed && !state.busy {
                return None;
            }
            state = self.work.wait(state, None);
        }
    }

    /// Damages the buffer of an operation that nobody else touches at the moment.
    pub(super) fn with_buffer(&self, task: &Task, damage: impl FnOnce(&mut Buffer)) {
        if let Some(buffer) = &mut self.state.lock().slots[task.slot].buffer {
            damage(buffer);
        }
    }

    /// Records how an operation ended. The first failure is passed on as it is, what follows it as its repetition.
    pub(super) fn finish(&self, task: &Task, result: Result<Option<Seat>, Arc<Error>>) {
        let mut state = self.state.lock();
        state.busy = false;
        let result = result.map_err(|cause| state.tell(cause));
        if result.is_ok() {
            let Called { action, len, dtype, .. } = task.called;
            state.stats.count(action, self.rank, self.world_size, len, dtype.size());
        }
        let slot = &mut state.slots[task.slot];
        slot.result = Some(result.map(|formed| slot.formed = formed));
        // The buffer of a forgotten operation is released after the lock.
        let _unseen = if slot.forgotten { state.vacate(task.slot) } else { None };
        let more = state.closed || !state.queue.is_empty();
        drop(state);
        self.ended.notify_all();
        if more {
            self.work.notify_all();
        }
    }

    /// Waits for an operation and gives its slot up. Whoever waits works: it carries out what is next, if nobody else does.
    pub(super) fn collect(
        &self,
        ticket: usize,
        carry_out: impl Fn(&Task),
    ) -> (Buffer, Result<(), Error>, Option<Seat>) {
        let mut state = self.state.lock();
        loop {
            if let Some(ended) = state.vacate(ticket) {
                return ended;
            }
            if let Some(task) = state.take() {
                drop(state);
                carry_out(&task);
                state = self.state.lock();
            } else {
                state = self.ended.wait(state, None);
            }
        }
    }

    pub(super) fn is_done(&self, ticket: usize) -> bool {
        self.state.lock().slots[ticket].result.is_some()
    }

    /// Waits until an operation has ended, but not longer than this by the clock; whether it has. It carries nothing out, as
    /// that may take longer.
    pub(super) fn ends_within(&self, ticket: usize, patience: Duration) -> bool {
        let until = self.clock.now().saturating_add(patience);
        let mut state = self.state.lock();
        while state.slots[ticket].result.is_none() {
            if self.clock.now() >= until {
                return false;
            }
            state = self.ended.wait(state, self.clock.sleep_for(until));
        }
        true
    }

    /// Gives an operation up unseen.
    pub(super) fn forget(&self, ticket: usize) {
        let mut state = self.state.lock();
        state.slots[ticket].forgotten = true;
        // If it has ended already its buffer is released here, after the lock.
        let _unseen = state.vacate(ticket);
        drop(state);
    }

    /// Takes no more operations; what is queued still runs.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.work.notify_all();
    }

    /// How many operations were taken in.
    pub(super) fn started(&self) -> u64 {
        self.state.lock().started
    }

    pub(super) fn stats(&self) -> Stats {
        self.state.lock().stats
    }
}

impl State {
    fn refuse(&self, rank: usize) -> Result<(), Error> {
        match &self.told {
            Some(cause) => Err(Error::Poisoned { cause: Arc::clone(cause) }),
            None if self.closed => Err(Error::Left { rank, op_number: self.started }),
            None => Ok(()),
        }
    }

    fn tell(&mut self, cause: Arc<Error>) -> Error {
        match &self.told {
            Some(cause) => Error::Poisoned { cause: Arc::clone(cause) },
            None => Error::clone(self.told.insert(cause)),
        }
    }

    /// The next operation, unless one is being carried out.
    fn take(&mut self) -> Option<Task> {
        if self.busy {
            return None;
        }
        let slot = self.queue.pop_front()?;
        self.busy = true;
        Some(self.slots[slot].task)
    }

    fn place(&mut self, task: impl FnOnce(usize) -> Task, buffer: Buffer) -> usize {
        let ticket = self.free.pop().unwrap_or(self.slots.len());
        let slot =
            Slot { task: task(ticket), buffer: Some(buffer), result: None, formed: None, forgotten: false };
        match self.slots.get_mut(ticket) {
            Some(old) => *old = slot,
            None => self.slots.push(slot),
        }
        ticket
    }

    /// Empties a slot whose operation has ended.
    fn vacate(&mut self, ticket: usize) -> Option<(Buffer, Result<(), Error>, Option<Seat>)> {
        let slot = &mut self.slots[ticket];
        let result = slot.result.take()?;
        let (buffer, formed) = (slot.buffer.take()?, slot.formed.take());
        self.free.push(ticket);
        Some((buffer, result, formed))
    }
}

impl Wake for Lane {
    fn wake(&self) {
        let _awake = self.state.lock();
        self.ended.notify_all();
    }
}
