//! Observers of reductions: they see a rank's chunk while it is in the cache.

use meshstep_tensor::Slice;
use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;

/// Observer of a reduction ([`Communicator::start_observed`](crate::Communicator::start_observed)).
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
