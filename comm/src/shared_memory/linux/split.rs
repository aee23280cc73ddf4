//! Groups within a group: new regions, which travel over the sockets of the group.

use super::bell::Bell;
use super::group::SharedMemory;
use super::layout::Layout;
use super::link::{Intro, Link};
use super::peer::{Expected, MemoryPeer, system};
use super::region::Region;
use crate::p2p::transport::{Lost, LostWhy, Transport};
use rustix::io::{Errno, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Introductions of a split need no proof: they travel between ranks that have met.
pub(super) const NO_PROOF: [u8; 32] = [0; 32];

/// Returns the transport of a group of `members`. It waits for nobody: each member sends its introduction now and takes the others'
/// when it looks for news. The lower rank of each pair makes the socket of the pair.
pub(super) fn split(
    group: &mut SharedMemory,
    members: &[usize],
    channel: u64,
) -> std::result::Result<SharedMemory, Lost> {
    let here = Lost { peer: group.rank(), why: LostWhy::Closed };
    let failed = |what| move |error: Errno| Lost { peer: here.peer, why: system(what, error.to_string()) };
    let Some(rank) = members.iter().position(|&member| member == group.rank()) else {
        panic!("rank {} splits off a group of {members:?}", group.rank());
    };
    let layout = Layout { world_size: members.len(), ..*group.layout() };
    let (own, file) = Region::create(layout).map_err(failed("creating memory"))?;
    let bell = Arc::new(Bell::new().map_err(failed("eventfd"))?);
    let mine = Mine { rank, channel, layout, file, bell };
    let mut peers = Vec::new();
    for (other, &member) in members.iter().enumerate() {
        let peer = if other == rank { None } else { Some(mine.introduce(group, member, other)?) };
        peers.push(peer);
    }
    SharedMemory::new(rank, own, peers, mine.bell).map_err(failed("epoll"))
}

/// This rank in the new group.
struct Mine {
    rank: usize,
    channel: u64,
    layout: Layout,
    file: OwnedFd,
    bell: Arc<Bell>,
}

impl Mine {
    /// Introduces this rank to `member` of `group`, which is `other` in the new one.
    fn introduce(
        &self,
        group: &mut SharedMemory,
        member: usize,
        other: usize,
    ) -> std::result::Result<MemoryPeer, Lost> {
        let parent = group.peer_mut(member)?.met_link()?;
        let link = self.send(&parent, other).map_err(|error| Lost {
            peer: member,
            why: system("sending an introduction", error.to_string()),
        })?;
        let intro = self.intro(other, self.rank);
        Ok(MemoryPeer::new(other, self.rank, &self.layout, link).expecting(Expected { parent, intro }))
    }

    /// Sends the introduction; returns this rank's end of the pair's socket if it made one.
    fn send(&self, parent: &Link, other: usize) -> Result<Option<Arc<Link>>> {
        let intro = self.intro(self.rank, other);
        if other < self.rank {
            return introduce_on(parent, &intro, &[self.file.as_fd(), self.bell.as_fd()]).map(|()| None);
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (here, there) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        introduce_on(parent, &intro, &[self.file.as_fd(), self.bell.as_fd(), there.as_fd()])?;
        Ok(Some(Arc::new(Link::new(here))))
    }

    fn intro(&self, from: usize, to: usize) -> Intro {
        Intro { channel: self.channel, from, to, layout: self.layout, proof: NO_PROOF }
    }
}

/// Sends an introduction. A rank that has closed its end needs none: what it wrote before is read to its end.
fn introduce_on(parent: &Link, intro: &Intro, files: &[BorrowedFd<'_>]) -> Result<()> {
    match parent.send(intro, files) {
        Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
        sent => sent,
    }
}
