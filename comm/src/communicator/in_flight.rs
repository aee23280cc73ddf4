//! Operation in flight that owns its buffer until `wait`.

use crate::Error;
use meshstep_tensor::{Buffer, Queue};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// A started operation. It owns the buffer; [`wait`](InFlight::wait) gives it back.
///
/// Dropping it is safe and cancels nothing: the operation runs, and the buffer is released when no rank accesses it any more.
#[derive(Debug)]
#[must_use = "waiting gives the buffer back"]
pub struct InFlight {
    tickets: Arc<dyn Tickets>,
    ticket: usize,
    redeemed: bool,
}

/// Backend's table of accepted operations, so that a start does not allocate.
///
/// ```
/// use meshstep_comm::{Error, InFlight, Tickets};
/// use meshstep_tensor::{Buffer, Category, Meter, Queue};
/// use std::sync::{Arc, Mutex};
/// use std::time::Duration;
///
/// /// Operations of a backend whose every operation has ended when it has started: those of one rank.
/// #[derive(Debug, Default)]
/// struct Done(Mutex<Vec<Option<Buffer>>>);
///
/// impl Tickets for Done {
///     fn redeem(&self, ticket: usize, _: &Queue) -> (Buffer, Result<(), Error>) {
///         let buffer = self.0.lock().unwrap()[ticket].take();
///         (buffer.expect("redeemed once"), Ok(()))
///     }
///
///     fn is_done(&self, _: usize) -> bool {
///         true
///     }
///
///     fn ends_within(&self, _: usize, _: Duration) -> bool {
///         true
///     }
///
///     fn forget(&self, ticket: usize) {
///         self.0.lock().unwrap()[ticket] = None;
///     }
/// }
///
/// let tickets = Arc::new(Done::default());
/// tickets.0.lock().unwrap().push(Some(Buffer::from_slice(&[1f32], &Meter::new(), Category::Grads)?));
/// let (buffer, ended) = InFlight::new(tickets, 0).wait(&Queue::cpu());
/// assert!(ended.is_ok() && buffer.len() == 1);
/// # Ok::<(), meshstep_tensor::Error>(())
/// ```
pub trait Tickets: Send + Sync + Debug {
    /// Waits until no rank accesses the ticket's buffer any more, orders `on` behind that, and gives the ticket up.
    fn redeem(&self, ticket: usize, on: &Queue) -> (Buffer, Result<(), Error>);

    /// Returns true if [`redeem`](Tickets::redeem) would return at once.
    fn is_done(&self, ticket: usize) -> bool;

    /// Waits until [`is_done`](Tickets::is_done), at most `patience` by the communicator's clock. Returns true if it is done.
    fn ends_within(&self, ticket: usize, patience: Duration) -> bool;

    /// Gives the ticket up without its result; the buffer is released when no rank accesses it any more.
    fn forget(&self, ticket: usize);
}

impl InFlight {
    /// Creates the result of a backend's `start`. `ticket` belongs to this value alone until it is redeemed or forgotten.
    pub fn new(tickets: Arc<dyn Tickets>, ticket: usize) -> Self {
        InFlight { tickets, ticket, redeemed: false }
    }

    /// Waits for the end, and orders `on` behind it: later work on that queue sees the result. The buffer always comes back, also
    /// with an error; its contents are unspecified then.
    pub fn wait(mut self, on: &Queue) -> (Buffer, Result<(), Error>) {
        self.redeemed = true;
        self.tickets.redeem(self.ticket, on)
    }

    /// Returns true if the operation has ended, successfully or not, so that [`wait`](InFlight::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.tickets.is_done(self.ticket)
    }

    /// Makes the host wait for the end, at most `patience` by the communicator's clock. Returns true if the operation has ended.
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
