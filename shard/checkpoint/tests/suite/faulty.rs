//! Disk with a fault before one call.

use crate::hooked::Hooked;
use meshstep_checkpoint::Disk;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Disk as one rank sees it.
#[derive(Clone)]
pub(crate) struct Faulty<D> {
    disk: Hooked<D>,
    calls: Arc<Calls>,
}

/// Event before a certain call.
pub(crate) enum Then {
    /// The call fails with this error; all later calls do too if the disk is gone for good.
    Refuse(Box<dyn Fn() -> io::Error + Send + Sync>, bool),
    /// This function runs, and the call continues.
    Do(Box<dyn Fn() + Send + Sync>),
}

struct Calls {
    /// Number of calls before the event plus one; 0 once it has happened and repeats.
    left: AtomicUsize,
    then: Then,
}

impl<D> Faulty<D> {
    /// Refuses one call, or one and every later call.
    pub(crate) fn new(inner: D, gone: bool, kind: io::ErrorKind) -> Self {
        let refusal = move || io::Error::new(kind, "as was asked for");
        Self::with(inner, Then::Refuse(Box::new(refusal), gone))
    }

    pub(crate) fn with(inner: D, then: Then) -> Self {
        let calls = Arc::new(Calls { left: AtomicUsize::new(usize::MAX), then });
        let its = Arc::clone(&calls);
        Faulty { disk: Hooked::new(inner, move |_| its.call()), calls }
    }

    pub(crate) fn disk(&self) -> Arc<dyn Disk>
    where
        D: Disk + Clone + 'static,
    {
        Arc::new(self.disk.clone())
    }

    /// Lets the event happen after `calls` more calls; `usize::MAX` means never.
    pub(crate) fn after(&self, calls: usize) {
        self.calls.left.store(calls.saturating_add(1), SeqCst);
    }

    /// Returns true if the event has not happened yet, and cancels it.
    pub(crate) fn never_came(&self) -> bool {
        !matches!(self.calls.left.swap(usize::MAX, SeqCst), 0 | usize::MAX)
    }
}

impl Calls {
    fn call(&self) -> io::Result<()> {
        let gone = matches!(self.then, Then::Refuse(_, true));
        let count = |left: usize| match left {
            usize::MAX => Some(left),
            0 => None,
            1 if !gone => Some(usize::MAX),
            left => Some(left - 1),
        };
        match (self.left.fetch_update(SeqCst, SeqCst, count), &self.then) {
            (Ok(1) | Err(_), Then::Refuse(error, _)) => Err(error()),
            (Ok(1) | Err(_), Then::Do(act)) => {
                act();
                Ok(())
            }
            (Ok(_), _) => Ok(()),
        }
    }
}
