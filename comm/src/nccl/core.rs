//! One rank's side of a group: its stream, its operations, and their tickets.

use super::capture::Captures;
use super::ledger::Ledger;
use super::options::Options;
use super::raw::Raw;
use super::watchdog;
use super::windows::Room;
use crate::Error;
use crate::communicator::in_flight::Tickets;
use crate::sync::real::{Condvar, Guard, Mutex};
use meshstep_tensor::cuda::{self, Device, Stream};
use meshstep_tensor::{Buffer, Category, DType, Queue};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

/// Longest sleep of a host wait between two polls.
pub(super) const NAP: Duration = Duration::from_millis(1);

/// Rank in a group.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// Number of the group, the same on all its ranks and unique to it.
    pub(super) group: u64,
    /// Ancestors of this group, from the root down.
    above: Vec<u64>,
    pub(super) raw: Raw,
    pub(super) options: Options,
    pub(super) stream: Stream,
    /// Held from the first to the last step of a launch: all communicators of a device launch in one order.
    order: Arc<Mutex<()>>,
    ledger: Mutex<Ledger>,
    changed: Condvar,
    pub(super) own: Mutex<Own>,
    pub(super) captures: Mutex<Captures>,
    /// NCCL allocations that this communicator has handed out.
    pub(super) rooms: Mutex<Vec<Room>>,
    /// Set before the rank leaves the group.
    closing: AtomicBool,
}

/// The communicator's own memory, until it is closed.
#[derive(Debug)]
pub(super) struct Own {
    /// Element that barriers reduce.
    pub(super) token: Option<Buffer>,
    /// Send copies, one for each `all_to_all` of a group of calls.
    pub(super) copies: Vec<Buffer>,
}

impl Core {
    /// Creates a rank from NCCL's communicator, watched from here on.
    pub(super) fn new(
        raw: Raw,
        (rank, world_size, group): (usize, usize, u64),
        above: Vec<u64>,
        device: &Device,
        options: Options,
    ) -> Result<Arc<Self>, Error> {
        let stream = Stream::urgent(device).map_err(device_error)?;
        let queue = Queue::cuda(stream.clone());
        let token = Buffer::zeroed_on(&queue, 1, DType::U64, &options.meter, Category::Staging)?;
        let core = Arc::new(Core {
            rank,
            world_size,
            group,
            above,
            raw,
            options,
            stream,
            order: order_of(device.ordinal()),
            ledger: Mutex::new(Ledger::new(rank, world_size)),
            changed: Condvar::new(),
            own: Mutex::new(Own { token: Some(token), copies: Vec::new() }),
            captures: Mutex::default(),
            rooms: Mutex::default(),
            closing: AtomicBool::new(false),
        });
        watchdog::watch(&core)?;
        Ok(core)
    }

    pub(super) fn device(&self) -> &Device {
        self.stream.device()
    }

    /// Returns true if this is the group, or was split from it.
    pub(super) fn is_within(&self, group: u64) -> bool {
        self.group == group || self.above.contains(&group)
    }

    /// Returns the ancestors of a group split from this one.
    pub(super) fn down(&self) -> Vec<u64> {
        self.above.iter().copied().chain([self.group]).collect()
    }

    pub(super) fn now(&self) -> Duration {
        self.options.clock.now()
    }

    /// Takes the device's launch lock.
    pub(super) fn turn(&self) -> Guard<'_, ()> {
        self.order.lock()
    }

    /// Locks the ledger and updates it to now. The watchdog also sees an error of the device.
    pub(super) fn ledger(&self) -> Guard<'_, Ledger> {
        let mut ledger = self.ledger.lock();
        if ledger.look(self.now()).is_err() {
            tracing::debug!(rank = self.rank, "the device cannot be queried");
        }
        ledger
    }

    pub(super) fn queue(&self) -> Queue {
        Queue::cuda(self.stream.clone())
    }

    /// Records a failure. Returns true if it is the first.
    pub(super) fn fail(&self, cause: &Arc<Error>) -> bool {
        self.ledger.lock().fail(cause)
    }

    /// Returns for the watchdog the first failure by now, if any, and the released buffers, to be dropped where a drop may block.
    pub(super) fn poll(&self) -> (Option<Error>, Vec<Buffer>) {
        let mut ledger = self.ledger.lock();
        let looked = ledger.look(self.now()).map_err(device_error);
        let released = ledger.released();
        let (failed, late) = (ledger.failed(), ledger.late(self.now()));
        drop(ledger);
        self.changed.notify_all();
        if failed {
            return (None, released);
        }
        let late = late.map_or(Ok(()), |late| {
            let (op_number, called) = (late.called.op_number, Box::new(late.called));
            Err(Error::Stuck { op_number, called, after: late.after })
        });
        let sound = looked.and(late).and_then(|()| self.state());
        (sound.err(), released)
    }

    /// Checks NCCL's state, unless the communicator is closing.
    fn state(&self) -> Result<(), Error> {
        if self.is_closing() {
            return Ok(());
        }
        self.device().make_current().map_err(device_error)?;
        self.raw.state().map(drop)
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Relaxed)
    }

    /// Returns true if there are operations that the watchdog should poll often.
    pub(super) fn is_busy(&self) -> bool {
        !self.ledger.lock().is_idle()
    }

    /// Waits until an operation has ended, which the watchdog guarantees, and takes its buffer.
    fn take(&self, ticket: usize) -> (Buffer, Result<(), Error>) {
        let mut nap = NAP / 50;
        loop {
            let mut ledger = self.ledger();
            if let Some(ended) = ledger.collect(ticket) {
                return ended;
            }
            drop(self.changed.wait(ledger, Some(nap)));
            nap = NAP.min(nap * 2);
        }
    }

    /// Makes `stream` wait for an operation, unless the communicator has failed.
    fn hand_over(&self, ticket: usize, stream: &Stream) -> Option<Buffer> {
        let end = Some(self.ledger()).filter(|ledger| !ledger.failed())?.end_of(ticket)?;
        // The watchdog needs the ledger while a free of memory on another thread holds off this call.
        stream.wait(&end).ok()?;
        Some(self.ledger()).filter(|ledger| !ledger.failed())?.part(ticket)
    }

    /// Waits for the started operations, leaves the group and frees the communicator's own memory.
    pub(super) fn close(self: &Arc<Self>) {
        while self.is_busy() {
            drop(self.ledger());
            std::thread::sleep(NAP / 20);
        }
        self.closing.store(true, Relaxed);
        self.drop_graphs();
        // Not within the condition: its lock would be held.
        let failed = self.ledger.lock().failed();
        if failed {
            watchdog::wait_for_ends();
        } else {
            self.end_windows();
            watchdog::part(self);
        }
        let own = std::mem::replace(&mut *self.own.lock(), Own { token: None, copies: Vec::new() });
        let released = self.ledger.lock().released();
        drop((own, released));
    }
}

impl Tickets for Core {
    fn redeem(&self, ticket: usize, on: &Queue) -> (Buffer, Result<(), Error>) {
        match on.stream().and_then(|stream| self.hand_over(ticket, stream)) {
            Some(buffer) => (buffer, Ok(())),
            None => self.take(ticket),
        }
    }

    fn is_done(&self, ticket: usize) -> bool {
        self.ledger().has_ended(ticket)
    }

    fn ends_within(&self, ticket: usize, patience: Duration) -> bool {
        let until = self.now().saturating_add(patience);
        let mut nap = NAP / 50;
        loop {
            let ledger = self.ledger();
            if ledger.has_ended(ticket) || self.now() >= until {
                return ledger.has_ended(ticket);
            }
            drop(self.changed.wait(ledger, Some(nap)));
            nap = NAP.min(nap * 2);
        }
    }

    fn forget(&self, ticket: usize) {
        // The buffer of an ended operation is freed after the lock.
        let _free = self.ledger().forget(ticket);
    }
}

pub(super) fn device_error(error: cuda::Error) -> Error {
    Error::Buffer(error.into())
}

/// Returns the launch lock of a device.
fn order_of(ordinal: usize) -> Arc<Mutex<()>> {
    static ORDERS: StdMutex<Option<HashMap<usize, Arc<Mutex<()>>>>> = StdMutex::new(None);
    let mut orders = ORDERS.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(orders.get_or_insert_default().entry(ordinal).or_default())
}
