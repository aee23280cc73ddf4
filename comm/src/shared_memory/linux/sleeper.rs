//! Sleep of a rank: until its bell rings, a socket of a peer ends, or an introduction arrives.

use super::bell::Bell;
use super::link::Link;
use super::peer::{MemoryPeer, system};
use crate::p2p::transport::LostWhy;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::{Errno, Result};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Mark of the bell's events; those of sockets have the rank.
const BELL: u64 = u64::MAX;
/// Longest sleep: the system counts milliseconds in 31 bits. The caller looks and sleeps again.
const LONGEST: Duration = Duration::from_secs(3600);
/// Events of one look; further ones stay for the next.
const EVENTS: usize = 8;

/// The bell and the sockets of a rank, in one epoll.
#[derive(Debug)]
pub(super) struct Sleeper {
    epoll: OwnedFd,
    bell: Arc<Bell>,
}

impl Sleeper {
    pub(super) fn new(bell: Arc<Bell>, peers: &[Option<MemoryPeer>]) -> Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &*bell, EventData::new_u64(BELL), EventFlags::IN)?;
        let sleeper = Sleeper { epoll, bell };
        peers.iter().flatten().try_for_each(|peer| sleeper.watch(peer))?;
        Ok(sleeper)
    }

    pub(super) fn bell(&self) -> Arc<Bell> {
        self.bell.clone()
    }

    /// Watches the peer's own socket, and no longer the one where its introduction arrived. An error leaves the end of that peer
    /// to the flag in its region and to deadlines.
    pub(super) fn watch_instead(&self, before: &Link, peer: &mut MemoryPeer) {
        let watched = epoll::delete(&self.epoll, before).and_then(|()| self.watch(peer));
        if let Err(error) = watched {
            peer.finish(system("watching its socket", error.to_string()));
        }
    }

    /// Watches the socket of the peer. Each event is reported once: an end stays, and messages for other groups are not news here.
    fn watch(&self, peer: &MemoryPeer) -> Result<()> {
        let Some(link) = peer.watched() else { return Ok(()) };
        let letters = if peer.is_expected() { EventFlags::IN } else { EventFlags::empty() };
        let flags = EventFlags::RDHUP | EventFlags::ET | letters;
        epoll::add(&self.epoll, &**link, EventData::new_u64(peer.rank() as u64), flags)
    }

    /// Sleeps until an event, and tells the peers their ends.
    pub(super) fn sleep(
        &self,
        at_most: Duration,
        peers: &mut [Option<MemoryPeer>],
    ) -> std::result::Result<(), LostWhy> {
        let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; EVENTS];
        let limit = Timespec::try_from(at_most.min(LONGEST)).map_err(|_| LostWhy::Altered)?;
        let count = match epoll::wait(&self.epoll, &mut events, Some(&limit)) {
            Err(Errno::INTR) => 0,
            result => result.map_err(|error| system("epoll_wait", error.to_string()))?,
        };
        for event in &events[..count] {
            let (flags, data) = (event.flags, event.data);
            self.handle(flags, data.u64(), peers);
        }
        Ok(())
    }

    fn handle(&self, flags: EventFlags, data: u64, peers: &mut [Option<MemoryPeer>]) {
        let ends = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
        if data == BELL {
            self.bell.silence();
        } else if let Some(Some(peer)) = peers.get_mut(data as usize)
            && flags.intersects(ends)
        {
            peer.hung_up();
        }
    }
}
