//! Observers of reductions: they see a rank's chunk while it is in the cache.

use meshstep_tensor::Slice;
use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;

/// Observer of a reduction ([`Communicator::start_observed`](crate::Communicator::start_observed)).
///
/// ```
/// use meshstep_comm::{Communicator, Error, Op, ReduceObserver, Reduction, loopback, name_calls};
/// use meshstep_tensor::{Buffer, Category, Meter, Queue, Slice};
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// /// Counts the elements of this rank's chunk.
/// #[derive(Debug, Default)]
/// struct Seen(AtomicUsize);
///
/// impl ReduceObserver for Seen {
///     fn see(&self, _: usize, values: Slice<'_>) {
///         self.0.fetch_add(values.len(), Ordering::Relaxed);
///     }
/// }
///
/// let ranks = loopback::spawn(2, |comm| -> Result<usize, Error> {
///     let _name: meshstep_comm::CallName = name_calls("my reduction"); // errors of other ranks name this call
///     let ones = Buffer::from_slice(&[1f32; 128], &Meter::new(), Category::Grads)?;
///     let seen = Arc::new(Seen::default());
///     let op = Op::reduce_scatter(Reduction::Sum);
///     let started = comm.start_observed(op, ones, &Queue::cpu(), seen.clone()).map_err(|(_, error)| error)?;
///     started.wait(&Queue::cpu()).1?;
///     Ok(seen.0.load(Ordering::Relaxed))
/// })?;
/// assert!(ranks.into_iter().all(|seen| seen.is_ok_and(|seen| seen <= 64))); // a backend may leave out elements: it counts
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait ReduceObserver: Send + Sync + Debug {
    /// Sees reduced elements of this rank's chunk, which begin at element `first` of the buffer. Called on any thread, also on several at
    /// once with different elements. It neither waits nor panics.
    fn see(&self, first: usize, values: Slice<'_>);
}

/// Address of an observer, which the operation's slot keeps alive until the operation has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Observed(NonNull<dyn ReduceObserver>);

// SAFETY: the address of an observer, which is `Send` and `Sync`.
unsafe impl Send for Observed {}
// SAFETY: as above.
unsafe impl Sync for Observed {}

impl Observed {
    pub(crate) fn of(observer: &Arc<dyn ReduceObserver>) -> Self {
        Observed(NonNull::from(&**observer))
    }

    /// Calls the observer.
    ///
    /// # Safety
    /// The operation runs.
    pub(crate) unsafe fn see(self, first: usize, values: Slice<'_>) {
        // SAFETY: the caller's promise: the slot holds the observer meanwhile.
        unsafe { self.0.as_ref() }.see(first, values);
    }
}
