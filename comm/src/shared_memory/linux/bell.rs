//! Wake-up of a rank: an eventfd.

use crate::p2p::transport::Waker;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Result;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Eventfd of a rank; its peers have it too. A peer can ring it for no reason, which costs one look at the words.
#[derive(Debug)]
pub(super) struct Bell {
    event: OwnedFd,
}

impl Bell {
    pub(super) fn new() -> Result<Self> {
        Ok(Bell { event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)? })
    }

    /// Takes the descriptor that a peer sent.
    pub(super) fn received(event: OwnedFd) -> Self {
        Bell { event }
    }

    /// Ends the sleep that is running, or the next one.
    pub(super) fn ring(&self) {
        // A full counter means that it has rung; no other error ends a sleep late by more than its limit.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Clears the eventfd.
    pub(super) fn silence(&self) {
        // An error means that it has not rung.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Waker for Bell {
    fn wake(&self) {
        self.ring();
    }
}
