//! A disk on which something happens before one call.

use crate::checkpoint::hooked::Hooked;
use meshstep_shard::checkpoint::Disk;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// One rank's view of a disk.
#[derive(Clone)]
pub(crate) struct Faulty<D> {
    disk: Hooked<D>,
    calls: Arc<Calls>,
}

/// What happens before the call of a number.
pub(crate) enum Then {
    /// It is refused with this, and all later ones where the disk is gone for good.
    Refuse(Box<dyn Fn() -> io::Error + Send + Sync>, bool),
    /// This, and the call goes on.
    Do(Box<dyn Fn() + Send + Sync>),
}

struct Calls {
    /// One more than the calls before; 0: it has happened, and goes on.
    left: AtomicUsize,
    then: Then,
}

impl<D> Faulty<D> {
    /// Refuses one call, or this and all later ones.
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

    /// It happens after `calls` more; `usize::MAX`: never.
    pub(crate) fn after(&self, calls: usize) {
        self.calls.left.store(calls.saturating_add(1), SeqCst);
    }

    /// Whether it has not happened yet; from now on it does not.
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
