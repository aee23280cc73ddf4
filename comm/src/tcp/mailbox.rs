//! Connections on their way from the threads that open them to the groups that use them.

use super::hello::GroupId;
use crate::p2p::transport::{LostWhy, Waker};
use crate::rendezvous::RawConnection;
use crate::sync::real::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Longest queue of connections for groups that this process has not formed.
const EARLY: usize = 4096;

/// New connection to a rank of a group, with its form: sealed or plain.
pub(super) type NewConnection = Result<(RawConnection, bool), LostWhy>;

/// Mailbox of one group.
#[derive(Debug)]
pub(super) struct Mailbox {
    arrivals: Mutex<Vec<(usize, NewConnection)>>,
    full: AtomicBool,
    waker: mio::Waker,
}

impl Mailbox {
    pub(super) fn new(waker: mio::Waker) -> Self {
        Mailbox { arrivals: Mutex::default(), full: AtomicBool::new(false), waker }
    }

    /// Puts a connection to rank `peer` of the group, and wakes the group's thread.
    pub(super) fn put(&self, peer: usize, arrival: NewConnection) {
        self.arrivals.lock().push((peer, arrival));
        self.full.store(true, Ordering::Release);
        self.wake();
    }

    /// Takes one connection; costs an atomic read if there is none.
    pub(super) fn take(&self) -> Option<(usize, NewConnection)> {
        if !self.full.load(Ordering::Acquire) {
            return None;
        }
        let mut arrivals = self.arrivals.lock();
        let arrival = arrivals.pop();
        self.full.store(!arrivals.is_empty(), Ordering::Release);
        arrival
    }
}

impl Waker for Mailbox {
    fn wake(&self) {
        // The system refuses only if the group's poll is gone, and with it the thread that would wait.
        let _ = self.waker.wake();
    }
}

/// Mailboxes of all groups of a process.
#[derive(Debug, Default)]
pub(super) struct Mailboxes(Mutex<GroupMailboxes>);

#[derive(Debug, Default)]
struct GroupMailboxes {
    generation: u64,
    open: HashMap<GroupId, Arc<Mailbox>>,
    /// Connections for groups that this process has not formed yet.
    early: Vec<(GroupId, usize, NewConnection)>,
}

impl Mailboxes {
    /// Adds a group's mailbox, with the connections that came before.
    pub(super) fn open(&self, group: GroupId, mailbox: &Arc<Mailbox>) {
        let mut state = self.0.lock();
        state.open.insert(group, Arc::clone(mailbox));
        let early = std::mem::take(&mut state.early);
        for (to, peer, arrival) in early {
            match to == group {
                true => mailbox.put(peer, arrival),
                false => state.early.push((to, peer, arrival)),
            }
        }
    }

    /// Removes a group; later connections to it are closed with its generation.
    pub(super) fn close(&self, group: GroupId) {
        self.0.lock().open.remove(&group);
    }

    /// Closes connections of earlier generations, also those that are still to come.
    pub(super) fn begin(&self, generation: u64) {
        let mut state = self.0.lock();
        state.generation = generation;
        state.early.retain(|(group, ..)| group.generation >= generation);
    }

    /// Hands a connection to its group; one of an earlier generation is closed.
    pub(super) fn deliver(&self, group: GroupId, peer: usize, arrival: NewConnection) {
        let mut state = self.0.lock();
        if let Some(mailbox) = state.open.get(&group) {
            return mailbox.put(peer, arrival);
        }
        if group.generation >= state.generation && state.early.len() < EARLY {
            state.early.push((group, peer, arrival));
        }
    }
}
