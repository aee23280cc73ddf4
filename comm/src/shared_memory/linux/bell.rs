//! Wake-up of a rank: an eventfd, and the word that says that the rank sleeps.

use super::region::Region;
use crate::p2p::transport::Waker;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Result;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::fence;

/// Bit of the sleep word: the rank sleeps.
const ASLEEP: u64 = 1;
/// Bit of the sleep word: the rank also waits for room in a ring.
const FOR_ROOM: u64 = 2;
/// Step of the number of sleeps, in the other bits.
const SLEEP: u64 = 4;

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

/// Publishes the sleep in this rank's region. The caller looks at its peers' words after this call and before it sleeps: either it
/// sees a peer's new word, or that peer sees this one and rings.
pub(super) fn fall_asleep(own: &Region, for_room: bool) {
    let word = own.word(own.layout().sleep());
    let sleeps = word.load(Relaxed) & !(ASLEEP | FOR_ROOM);
    word.store(sleeps | ASLEEP | if for_room { FOR_ROOM } else { 0 }, Relaxed);
    fence(SeqCst);
}

/// Publishes the end of the sleep.
pub(super) fn wake_up(own: &Region) {
    let word = own.word(own.layout().sleep());
    let sleeps = word.load(Relaxed) & !(ASLEEP | FOR_ROOM);
    word.store(sleeps.wrapping_add(SLEEP), Relaxed);
}

/// News for a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    Bytes,
    Room,
    PeerEnd,
}

/// Rings the bell of a peer that sleeps and waits for `news`, once in each of its sleeps. `rung` is the last sleep that was ended.
/// The caller has published the news, and a fence lies between that and this call.
pub(super) fn tell(peer: &Region, bell: &Bell, rung: &mut u64, news: News) {
    let sleep = peer.word(peer.layout().sleep()).load(Relaxed);
    let waits = sleep & ASLEEP != 0 && (news != News::Room || sleep & FOR_ROOM != 0);
    if waits && *rung != sleep {
        *rung = sleep;
        bell.ring();
    }
}
