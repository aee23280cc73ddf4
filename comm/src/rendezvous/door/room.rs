//! Places for connections that have not proven that they know the token. Arithmetic only: no sockets and no clock.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Most strangers at a time.
const MAX: usize = 256;
/// Most strangers of one source address at a time.
const MAX_PER_SOURCE: usize = 64;
/// Time for a stranger's greeting.
pub(super) const GREETING: Duration = Duration::from_millis(250);

/// Strangers in the order of their arrival, by ascending ids.
#[derive(Debug)]
pub(super) struct StrangerRoom {
    strangers: BTreeMap<usize, Stranger>,
    /// Time for a whole handshake.
    handshake: Duration,
}

#[derive(Debug)]
struct Stranger {
    from: IpAddr,
    since: Instant,
    until: Instant,
    greeted: bool,
}

impl StrangerRoom {
    pub(super) fn new(handshake: Duration) -> Self {
        StrangerRoom { strangers: BTreeMap::new(), handshake }
    }

    /// Admits a stranger. Returns the one that makes room: the oldest without a greeting, of the same source if that has too many.
    pub(super) fn arrive(&mut self, id: usize, from: IpAddr, now: Instant) -> Option<usize> {
        let of_source = self.strangers.values().filter(|stranger| stranger.from == from).count();
        let evicted = match self.strangers.len() {
            _ if of_source >= MAX_PER_SOURCE => self.oldest(|stranger| stranger.from == from),
            MAX.. => self.oldest(|_| true),
            _ => None,
        };
        evicted.map(|id| self.strangers.remove(&id));
        let until = now + GREETING.min(self.handshake);
        self.strangers.insert(id, Stranger { from, since: now, until, greeted: false });
        evicted
    }

    /// Records a greeting; the rest of the handshake has its own time.
    pub(super) fn greeted(&mut self, id: usize) {
        let handshake = self.handshake;
        if let Some(stranger) = self.strangers.get_mut(&id) {
            stranger.greeted = true;
            stranger.until = stranger.since + handshake;
        }
    }

    pub(super) fn leave(&mut self, id: usize) {
        self.strangers.remove(&id);
    }

    /// Removes and returns the strangers past their time, with the time that each had.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<(usize, Duration)> {
        let late = |stranger: &Stranger| stranger.until <= now;
        let expired = self.strangers.extract_if(.., |_, stranger| late(stranger));
        expired.map(|(id, stranger)| (id, stranger.until - stranger.since)).collect()
    }

    /// Returns the earliest end of a stranger's time.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.strangers.values().map(|stranger| stranger.until).min()
    }

    fn oldest(&self, eligible: impl Fn(&Stranger) -> bool) -> Option<usize> {
        let eligible = || self.strangers.iter().filter(|(_, stranger)| eligible(stranger));
        let silent = eligible().find(|(_, stranger)| !stranger.greeted);
        silent.or_else(|| eligible().next()).map(|(id, _)| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(number: usize) -> IpAddr {
        IpAddr::from([10, 0, (number / 256) as u8, (number % 256) as u8])
    }

    fn room() -> (StrangerRoom, Instant) {
        (StrangerRoom::new(Duration::from_secs(5)), Instant::now())
    }

    #[test]
    fn a_flood_of_one_source_evicts_its_own_alone() {
        let (mut room, now) = room();
        assert_eq!(room.arrive(0, source(1), now), None);
        for id in 1..1000 {
            let evicted = room.arrive(id, source(2), now);
            assert_eq!(evicted, id.checked_sub(MAX_PER_SOURCE).filter(|&id| id > 0), "{id}");
        }
        assert_eq!(room.strangers.len(), 1 + MAX_PER_SOURCE);
        assert!(room.strangers.contains_key(&0));
    }

    #[test]
    fn a_flood_of_many_sources_evicts_the_oldest_without_a_greeting() {
        let (mut room, now) = room();
        for id in 0..MAX {
            assert_eq!(room.arrive(id, source(id), now), None);
        }
        room.greeted(0);
        room.greeted(2);
        let evicted: Vec<_> = (MAX..MAX + 3).map(|id| room.arrive(id, source(id), now)).collect();
        assert_eq!(evicted, [Some(1), Some(3), Some(4)]);
        assert_eq!(room.strangers.len(), MAX);
    }

    #[test]
    fn recorded_greetings_do_not_keep_the_room_full() {
        let (mut room, now) = room();
        for id in 0..2 * MAX {
            room.arrive(id, source(id), now);
            room.greeted(id);
        }
        assert_eq!(room.strangers.keys().next(), Some(&MAX));
    }

    #[test]
    fn a_greeting_has_a_quarter_second_and_the_rest_its_own_time() {
        let (mut room, now) = room();
        room.arrive(1, source(1), now);
        room.arrive(2, source(1), now);
        room.greeted(2);
        assert_eq!(room.next_end(), Some(now + GREETING));
        assert_eq!(room.expire(now + GREETING / 2), []);
        assert_eq!(room.expire(now + GREETING), [(1, GREETING)]);
        assert_eq!(room.next_end(), Some(now + Duration::from_secs(5)));
        assert_eq!(room.expire(now + Duration::from_secs(5)), [(2, Duration::from_secs(5))]);
        assert_eq!(room.next_end(), None);
    }
}
