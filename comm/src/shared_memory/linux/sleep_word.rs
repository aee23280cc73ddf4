//! Words through which ranks publish positions, and the word that says that a rank sleeps.
//!
//! A rank that publishes a position and a rank that falls asleep both store a word, pass a fence and load the other's word: at least one
//! of them sees the other's store. So no rank sleeps beside news without being rung. `model` runs this file on loom's primitives.

use super::primitives::{AtomicU64, Ordering, fence};
use Ordering::{Relaxed, Release, SeqCst};

/// Bit of the sleep word: the rank sleeps.
const ASLEEP: u64 = 1;
/// Bit of the sleep word: the rank also waits for room in a ring.
const FOR_ROOM: u64 = 2;
/// Step of the number of sleeps, in the other bits.
const SLEEP: u64 = 4;

/// Publishes a position. Everything before it is visible to a rank that loads it: bytes written, or reads that are over. The fence lies
/// between the store and the look at the sleep words that follows ([`tell`]).
pub(super) fn publish(word: &AtomicU64, position: u64) {
    word.store(position, Release);
    fence(SeqCst);
}

/// Publishes the sleep in this rank's word. The caller looks at its peers' words after this call and before it sleeps: either it
/// sees a peer's new word, or that peer sees this one and rings.
pub(super) fn fall_asleep(word: &AtomicU64, for_room: bool) {
    let sleeps = word.load(Relaxed) & !(ASLEEP | FOR_ROOM);
    word.store(sleeps | ASLEEP | if for_room { FOR_ROOM } else { 0 }, Relaxed);
    fence(SeqCst);
}

/// Publishes the end of the sleep.
pub(super) fn wake_up(word: &AtomicU64) {
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
/// The caller has published the news by [`publish`].
pub(super) fn tell(word: &AtomicU64, rung: &mut u64, news: News, ring: impl FnOnce()) {
    let sleep = word.load(Relaxed);
    let waits = sleep & ASLEEP != 0 && (news != News::Room || sleep & FOR_ROOM != 0);
    if waits && *rung != sleep {
        *rung = sleep;
        ring();
    }
}
