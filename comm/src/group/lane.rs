//! One rank's queue of operations, and the slots that hold their buffers until they are waited for.

use super::seat::{Besides, Ended, RankSeat};
use crate::clock::Wake;
use crate::communicator::call_name;
use crate::communicator::observing::Observed;
use crate::sync::{Condvar, Mutex};
use crate::{Called, Clock, Error, Op, ReduceObserver, Stats};
use meshstep_tensor::{Buffer, Place};
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Initial capacity for operations in flight; more operations grow it once.
const ROOM: usize = 64;

/// Queue between the callers of a rank and its communication thread: each runs the next operation if no other thread is running
/// one. The thread that starts an operation also begins it if all earlier ones have begun. The communication thread runs operations
/// while no caller waits, and only if one of them needs a thread of this rank.
#[derive(Debug)]
pub(crate) struct Lane<S: RankSeat> {
    rank: usize,
    world_size: usize,
    clock: Clock,
    state: Mutex<LaneState<S>>,
    /// Signals that there is work, or that no more will come.
    work: Condvar,
    /// Signals that an operation has ended.
    ended: Condvar,
}

#[derive(Debug)]
struct LaneState<S: RankSeat> {
    slots: Vec<LaneSlot<S>>,
    free: Vec<usize>,
    queue: VecDeque<usize>,
    /// True while an operation runs. They run one at a time.
    busy: bool,
    /// Operations that have not begun.
    not_begun: usize,
    /// Operations in the queue that need a thread of this rank.
    wanted: usize,
    /// Threads that wait in [`collect`](Lane::collect).
    callers: usize,
    /// True if the communication thread looks for an operation that a caller is beginning.
    passed_over: bool,
    started: u64,
    closed: bool,
    /// Failure that this rank has returned to its caller.
    told: Option<Arc<Error>>,
    stats: Stats,
}

/// Slot of one operation: taken by `enqueue`, freed by `collect` or, if forgotten, by `finish`.
#[derive(Debug)]
struct LaneSlot<S: RankSeat> {
    task: Task<S::Memory>,
    buffer: Option<Buffer>,
    result: Option<Result<(), Error>>,
    ended: Ended<S>,
    forgotten: bool,
    /// True if it is counted in `wanted`.
    wanted: bool,
    /// Observer of the operation, alive until the next one takes the slot.
    _observer: Option<Arc<dyn ReduceObserver>>,
}

/// An operation that was taken in: its ticket, and its task if the caller begins it.
type Enqueued<S> = (usize, Option<Task<<S as RankSeat>::Memory>>);

/// An operation, with the data needed to run it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task<M> {
    pub(crate) slot: usize,
    pub(crate) op: Op,
    pub(crate) called: Called,
    pub(crate) memory: M,
    pub(crate) stage: TaskStage,
    /// Only the caller that collects the operation runs it.
    pub(crate) own: bool,
    pub(crate) observer: Option<Observed>,
}

/// Progress of an operation before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskStage {
    Queued,
    /// A caller is beginning it.
    Beginning,
    /// The other ranks know of it.
    Posted,
}

impl<S: RankSeat> Lane<S> {
    pub(crate) fn new(rank: usize, world_size: usize, clock: &Clock) -> Arc<Self> {
        let state = LaneState {
            slots: Vec::with_capacity(ROOM),
            free: Vec::with_capacity(ROOM),
            queue: VecDeque::with_capacity(ROOM),
            busy: false,
            not_begun: 0,
            wanted: 0,
            callers: 0,
            passed_over: false,
            started: 0,
            closed: false,
            told: None,
            stats: Stats::default(),
        };
        let (state, work, ended) = (Mutex::new(state), Condvar::new(), Condvar::new());
        let lane = Arc::new(Lane { rank, world_size, clock: clock.clone(), state, work, ended });
        let weak: Weak<Lane<S>> = Arc::downgrade(&lane);
        clock.register(weak);
        lane
    }

    /// Takes an operation in, or returns the buffer with the error. If all earlier ones have begun, the caller also gets the task and
    /// begins it ([`begun`](Lane::begun)).
    pub(crate) fn enqueue(
        &self,
        op: Op,
        (buffer, besides): (Buffer, Besides<'_>),
    ) -> Result<Enqueued<S>, (Buffer, Error)> {
        let (len, dtype) = (buffer.len(), buffer.dtype());
        let checked = match besides {
            Besides::Writer(_) => op.action().check_written(self.rank, self.world_size, len, dtype),
            _ => op.check(self.rank, self.world_size, len, dtype),
        };
        if let Err(error) = checked {
            return Err((buffer, error));
        }
        // These backends read and write the memory by the CPU.
        if buffer.place() != Place::Cpu {
            let elsewhere = meshstep_tensor::Error::Place { given: buffer.place(), expected: Place::Cpu };
            return Err((buffer, elsewhere.into()));
        }
        let mut state = self.state.lock();
        if let Err(error) = state.refuse(self.rank) {
            return Err((buffer, error));
        }
        let called =
            Called { op_number: state.started, action: op.action(), len, dtype, by: call_name::current() };
        state.started += 1;
        let memory = S::memory(&buffer, op.action(), besides);
        let (own, kept) = (matches!(besides, Besides::Writer(_)), besides.observer());
        let observer = kept.as_ref().map(Observed::of);
        let begins = state.not_begun == 0;
        let stage = if begins { TaskStage::Beginning } else { TaskStage::Queued };
        let ticket =
            state.place(|slot| Task { slot, op, called, memory, stage, own, observer }, (buffer, kept));
        state.queue.push_back(ticket);
        state.not_begun += 1;
        let task = begins.then(|| state.slots[ticket].task);
        Ok((ticket, task))
    }

    /// Notes that its caller has begun a task, or has left it to be run as a whole.
    pub(crate) fn begun(&self, task: &Task<S::Memory>, posted: bool) {
        let mut state = self.state.lock();
        state.slots[task.slot].task.stage = if posted { TaskStage::Posted } else { TaskStage::Queued };
        state.not_begun -= usize::from(posted);
        let passed_over = std::mem::take(&mut state.passed_over);
        let waits = state.callers > 0;
        drop(state);
        if waits {
            self.ended.notify_all();
        }
        if passed_over {
            self.work.notify_all();
        }
    }

    /// Makes the communication thread run an operation, if no caller waits, unless it has ended.
    pub(crate) fn want(&self, ticket: usize) {
        let mut state = self.state.lock();
        state.want(ticket);
        drop(state);
        self.work.notify_all();
    }

    /// Waits for the next operation; returns `None` when the rank has left and all its started operations are done.
    pub(crate) fn next(&self) -> Option<Task<S::Memory>> {
        let mut state = self.state.lock();
        loop {
            if state.closed || state.wanted > 0 && state.callers == 0 {
                if let Some(task) = state.take(None) {
                    return Some(task);
                }
                if state.closed && !state.busy && state.queue.is_empty() {
                    return None;
                }
                state.passed_over = true;
            }
            state = self.work.wait(state, None);
        }
    }

    /// Records the result of an operation. The first failure is passed on unchanged, later ones as [`Error::Poisoned`].
    pub(crate) fn finish(&self, task: &Task<S::Memory>, result: Result<Ended<S>, Arc<Error>>) {
        let mut state = self.state.lock();
        state.busy = false;
        let result = result.map_err(|cause| state.tell(cause));
        if result.is_ok() {
            let Called { action, len, dtype, .. } = task.called;
            state.stats.count(action, self.rank, self.world_size, len, dtype.size());
        }
        state.not_begun -= usize::from(task.stage != TaskStage::Posted);
        state.wanted -= usize::from(state.slots[task.slot].wanted);
        let slot = &mut state.slots[task.slot];
        slot.result = Some(result.map(|ended| slot.ended = ended));
        // The buffer of a forgotten operation is released after the lock.
        let _unseen = if slot.forgotten { state.vacate(task.slot) } else { None };
        let more = state.has_work();
        drop(state);
        self.ended.notify_all();
        if more {
            self.work.notify_all();
        }
    }

    /// Waits for an operation and frees its slot. A waiting thread runs the next operation if no other thread is running one.
    pub(crate) fn collect(
        &self,
        ticket: usize,
        mut carry_out: impl FnMut(&Task<S::Memory>),
    ) -> (Buffer, Result<(), Error>, Ended<S>) {
        let (mut state, mut tired) = (self.state.lock(), false);
        state.callers += 1;
        let ended = loop {
            if let Some(ended) = state.vacate(ticket) {
                break ended;
            }
            if let Some(task) = state.take(Some(ticket)) {
                drop(state);
                carry_out(&task);
                state = self.state.lock();
            } else {
                state = self.ended.wait_awake(state, None, &mut tired);
            }
        };
        state.callers -= 1;
        let more = state.has_work();
        drop(state);
        if more {
            self.work.notify_all();
        }
        ended
    }

    /// Returns true if an operation has ended. An operation that was begun, and that another rank has ended since, is ended here too.
    pub(crate) fn is_done(
        &self,
        ticket: usize,
        is_ready: impl Fn(&Task<S::Memory>) -> bool,
        carry_out: impl Fn(&Task<S::Memory>),
    ) -> bool {
        let mut state = self.state.lock();
        loop {
            if state.slots[ticket].result.is_some() {
                return true;
            }
            let ready =
                |task: &Task<S::Memory>| task.stage == TaskStage::Posted && !task.own && is_ready(task);
            let Some(task) = state.take_if(ready) else { return false };
            drop(state);
            carry_out(&task);
            state = self.state.lock();
        }
    }

    /// Waits until an operation has ended, at most `patience` by the clock; returns true if it has. It runs no operation, as that
    /// may take longer.
    pub(crate) fn ends_within(&self, ticket: usize, patience: Duration) -> bool {
        let until = self.clock.now().saturating_add(patience);
        let mut state = self.state.lock();
        state.want(ticket);
        self.work.notify_all();
        while state.slots[ticket].result.is_none() {
            if self.clock.now() >= until {
                return false;
            }
            state = self.ended.wait(state, self.clock.sleep_for(until));
        }
        true
    }

    /// Forgets an operation without its result.
    pub(crate) fn forget(&self, ticket: usize) {
        let mut state = self.state.lock();
        state.slots[ticket].forgotten = true;
        // If the operation has ended already, its buffer is released here, after the lock.
        let _unseen = state.vacate(ticket);
        state.want(ticket);
        drop(state);
        self.work.notify_all();
    }

    /// Closes the queue: new operations are refused, queued ones still run.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.work.notify_all();
    }

    /// Returns the number of enqueued operations.
    pub(crate) fn started(&self) -> u64 {
        self.state.lock().started
    }

    pub(crate) fn stats(&self) -> Stats {
        self.state.lock().stats
    }
}

impl<S: RankSeat> LaneState<S> {
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

    /// Counts an operation as one that needs a thread of this rank, unless it has ended.
    fn want(&mut self, ticket: usize) {
        let slot = &mut self.slots[ticket];
        if slot.buffer.is_some() && slot.result.is_none() && !slot.wanted {
            slot.wanted = true;
            self.wanted += 1;
        }
    }

    /// Returns true if the communication thread has an operation to run.
    fn has_work(&self) -> bool {
        let none_waits = self.wanted > 0 && self.callers == 0;
        !self.busy && (self.closed || none_waits && !self.queue.is_empty())
    }

    /// Takes the next operation, unless one is running, the next is being begun, or it is another caller's own. `by` is the operation
    /// that the caller collects.
    fn take(&mut self, by: Option<usize>) -> Option<Task<S::Memory>> {
        self.take_if(|task| !task.own || by == Some(task.slot))
    }

    /// Takes the next operation if it is as wanted, unless one is running.
    fn take_if(&mut self, wanted: impl FnOnce(&Task<S::Memory>) -> bool) -> Option<Task<S::Memory>> {
        let slot = *self.queue.front().filter(|_| !self.busy)?;
        let task = &self.slots[slot].task;
        if task.stage == TaskStage::Beginning || !wanted(task) {
            return None;
        }
        self.queue.pop_front();
        self.busy = true;
        Some(self.slots[slot].task)
    }

    fn place(
        &mut self,
        task: impl FnOnce(usize) -> Task<S::Memory>,
        (buffer, observer): (Buffer, Option<Arc<dyn ReduceObserver>>),
    ) -> usize {
        let ticket = self.free.pop().unwrap_or(self.slots.len());
        let slot = LaneSlot {
            task: task(ticket),
            buffer: Some(buffer),
            result: None,
            ended: Ended::default(),
            forgotten: false,
            wanted: false,
            _observer: observer,
        };
        match self.slots.get_mut(ticket) {
            Some(old) => *old = slot,
            None => self.slots.push(slot),
        }
        ticket
    }

    /// Empties the slot of an ended operation.
    fn vacate(&mut self, ticket: usize) -> Option<(Buffer, Result<(), Error>, Ended<S>)> {
        let slot = &mut self.slots[ticket];
        let result = slot.result.take()?;
        let (buffer, ended) = (slot.buffer.take()?, std::mem::take(&mut slot.ended));
        self.free.push(ticket);
        Some((buffer, result, ended))
    }
}

impl<S: RankSeat> Wake for Lane<S> {
    fn wake(&self) {
        let _awake = self.state.lock();
        self.ended.notify_all();
    }
}
