//! One rank's side of a group, shared by its threads and by the groups split from it.

use super::engine::Engine;
use super::failure::Stop;
use super::hosts::Hosts;
use super::transport::{Transport, Waker, WindowAllocator};
use crate::clock::Wake;
use crate::sync::real::{Condvar, Mutex};
use crate::{Clock, Error};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// One rank's side of a group.
#[derive(Debug)]
pub(super) struct P2pGroup {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) clock: Clock,
    pub(super) timeout: Duration,
    pub(super) drop_wait: Duration,
    /// Allocator of memory that the ranks read in place, if they share a host.
    pub(super) windows: Option<Arc<dyn WindowAllocator>>,
    /// Buffers that this rank has registered.
    pub(super) registered: Mutex<u64>,
    /// Parent group. An abort comes from there too, and the failure of a rank to form this group, so a rank that waits here looks at it.
    above: Option<Parent>,
    /// Groups split from this one that are still alive.
    below: Mutex<Vec<Weak<P2pGroup>>>,
    waker: Arc<dyn Waker>,
    /// Failure from another thread or group, for whichever thread uses the engine.
    raised: Mutex<Option<Error>>,
    pub(super) engine: Mutex<Engine>,
    departed: Mutex<bool>,
    departure: Condvar,
}

/// Parent of a group, and the split that formed the group.
#[derive(Debug)]
pub(super) struct Parent {
    pub(super) group: Arc<P2pGroup>,
    /// Number of the split.
    pub(super) op_number: u64,
}

impl P2pGroup {
    pub(super) fn new(
        (transport, hosts): (Box<dyn Transport>, Hosts),
        clock: Clock,
        timeout: Duration,
        above: Option<Parent>,
    ) -> Arc<Self> {
        let group = Arc::new(P2pGroup {
            rank: transport.rank(),
            world_size: transport.world_size(),
            clock,
            timeout,
            drop_wait: transport.drop_wait(),
            windows: transport.window_allocator(),
            registered: Mutex::default(),
            above,
            below: Mutex::default(),
            waker: transport.waker(),
            raised: Mutex::default(),
            engine: Mutex::new(Engine::new(transport, hosts)),
            departed: Mutex::default(),
            departure: Condvar::new(),
        });
        let weak: Weak<P2pGroup> = Arc::downgrade(&group);
        group.clock.register(weak);
        if let Some(above) = &group.above {
            let mut below = above.group.below.lock();
            below.retain(|group| group.strong_count() > 0);
            below.push(Arc::downgrade(&group));
        }
        group
    }

    /// Fails this group by `error`, on every rank: at once if no operation of this rank runs, or else by that operation's thread.
    pub(super) fn raise(&self, error: Error) {
        self.raised.lock().get_or_insert(error);
        self.waker.wake();
        self.fail_aside();
    }

    /// Writes a raised failure to the other ranks, unless a thread uses the engine, which calls this when it has ended.
    pub(super) fn fail_aside(&self) {
        while self.raised.lock().is_some() {
            let Some(mut engine) = self.engine.try_lock() else { return };
            let raised = self.raised.lock().take();
            if let Some(error) = raised {
                engine.fail_aside(error);
            }
        }
    }

    /// Takes a raised failure.
    pub(super) fn take_raised(&self) -> Result<(), Stop> {
        match self.raised.lock().take() {
            Some(error) => Err(Stop::Found(error)),
            None => Ok(()),
        }
    }

    /// Fails this group and all groups split from it.
    pub(super) fn abort(&self, error: &Error) {
        self.raise(error.clone());
        self.abort_below(error);
    }

    /// Fails all child groups.
    pub(super) fn abort_below(&self, error: &Error) {
        let below: Vec<_> = self.below.lock().iter().filter_map(Weak::upgrade).collect();
        below.iter().for_each(|group| group.abort(error));
    }

    /// Looks for aborts of the groups that this one was split from, directly or not, and for ranks that could not form this one.
    pub(super) fn look_above(&self) {
        let Some(Parent { group: above, op_number }) = &self.above else { return };
        above.look_above();
        let heard = above.engine.try_lock().map(|mut engine| {
            engine.links.poll();
            (engine.abort_heard(), engine.failure_heard(*op_number))
        });
        match heard {
            Some((Some(abort), _)) => above.abort_below(&abort),
            // The engine of this group may be in use by the thread that looks.
            Some((None, Some(error))) => {
                self.raised.lock().get_or_insert(error);
            }
            _ => {}
        }
    }

    /// Returns true if this group was split from another one.
    pub(super) fn is_split(&self) -> bool {
        self.above.is_some()
    }

    pub(super) fn depart(&self, op_number: u64) {
        self.engine.lock().leave(op_number, self.timeout);
        *self.departed.lock() = true;
        self.departure.notify_all();
    }

    /// Waits until this rank has departed, at most `within`.
    pub(super) fn await_departure(&self, within: Duration) {
        let departed = self.departed.lock();
        if !*departed {
            drop(self.departure.wait(departed, Some(within)));
        }
    }
}

impl Wake for P2pGroup {
    fn wake(&self) {
        self.waker.wake();
    }
}

impl Drop for P2pGroup {
    fn drop(&mut self) {
        self.engine.lock().links.transport.close();
    }
}
