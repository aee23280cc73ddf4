//! An operation that owns its buffer until it is waited for.

use crate::Error;
use meshstep_tensor::{Buffer, Queue};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// A started operation. It owns the buffer; [`wait`](InFlight::wait) gives it back.
///
/// Dropping it is safe and cancels nothing: the operation runs, and the buffer is released when nothing touches it any
/// more.
#[derive(Debug)]
#[must_use = "waiting gives the buffer back"]
pub struct InFlight {
    tickets: Arc<dyn Tickets>,
    ticket: usize,
    redeemed: bool,
}

/// Where a backend keeps the operations it has accepted, so that starting one allocates nothing.
pub trait Tickets: Send + Sync + Debug {
    /// Waits until nothing touches the ticket's buffer any more, orders `on` behind that, and gives the ticket up.
    fn redeem(&self, ticket: usize, on: &Queue) -> (Buffer, Result<(), Error>);

    /// Whether [`redeem`](Tickets::redeem) would return at once.
    fn is_done(&self, ticket: usize) -> bool;

    /// Waits until [`is_done`](Tickets::is_done), but not longer than this by the communicator's clock; whether it is.
    fn ends_within(&self, ticket: usize, patience: Duration) -> bool;

    /// Gives the ticket up unseen; the buffer is released when nothing touches it any more.
    fn forget(&self, ticket: usize);
}

impl InFlight {
    /// What a backend's `start` returns. `ticket` belongs to this value alone until it is redeemed or forgotten.
    pub fn new(tickets: Arc<dyn Tickets>, ticket: usize) -> Self {
        InFlight { tickets, ticket, redeemed: false }
    }

    /// Waits for the end, and orders `on` behind it: what is put on that queue afterwards sees the result. The buffer
    /// always comes back, also with an error; its contents are unspecified then.
    pub fn wait(mut self, on: &Queue) -> (Buffer, Result<(), Error>) {
        self.redeemed = true;
        self.tickets.redeem(self.ticket, on)
    }

    /// Whether the operation has ended, well or not, so that [`wait`](InFlight::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.tickets.is_done(self.ticket)
    }

    /// Has the host wait for the end, but not longer than this by the communicator's clock. Whether it has come.
    pub fn ends_within(&self, patience: Duration) -> bool {
        self.tickets.ends_within(self.ticket, patience)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if !self.redeemed {
            self.tickets.forget(self.ticket);
        }
    }
}
