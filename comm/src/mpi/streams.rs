//! GroupStreams of one group, in both directions, and the requests under way.

use super::announcements::{self, Announcements, StreamTags};
use super::calls::{CallFault, Calls, Ended, Requests};
use super::identity::GroupId;
use super::incoming::IncomingTiles;
use super::outgoing::Outgoing;
use super::tiles::TILES;
use crate::p2p::transport::{Lost, LostWhy};

/// GroupStreams between this rank and the others of its group.
///
/// Dropped with a message under way they leak their memory until the end of the process, as MPI may still write it.
#[derive(Debug)]
pub(super) struct GroupStreams {
    group: GroupId,
    requests: Requests,
    /// By rank in the group.
    peers: Vec<PeerStreams>,
    /// Stream of each `TILES` requests.
    owners: Vec<Owner>,
    /// Peers, other than this rank, that have not announced their stream.
    unannounced: usize,
    /// Tag of the creation of the group's communicator, once rank 0 has chosen or announced it.
    creation_tag: Option<u64>,
}

/// Both streams of one rank.
#[derive(Debug)]
struct PeerStreams {
    /// Rank in the job.
    rank: usize,
    outgoing: Option<Outgoing>,
    incoming: Option<IncomingTiles>,
    lost: Option<LostWhy>,
    /// The caller knows of the loss.
    told: bool,
}

#[derive(Clone, Copy, Debug)]
enum Owner {
    Outgoing(usize),
    IncomingTiles(usize),
}

impl GroupStreams {
    /// GroupStreams of `group`: its ranks are `members` of the job. They open when first used.
    pub(super) fn new(group: GroupId, members: impl IntoIterator<Item = usize>) -> Self {
        let peer = |rank| PeerStreams { rank, outgoing: None, incoming: None, lost: None, told: false };
        let peers: Vec<PeerStreams> = members.into_iter().map(peer).collect();
        let unannounced = peers.len().saturating_sub(1);
        let (requests, owners) = (Requests::default(), Vec::new());
        GroupStreams { group, requests, peers, owners, unannounced, creation_tag: None }
    }

    /// Chooses the tag of the creation of the group's communicator, on the group's rank 0.
    pub(super) fn choose_creation_tag(&mut self, tag: u64) {
        self.creation_tag = Some(tag);
    }

    /// Tag of the creation of the group's communicator, once it is known: at the latest with the first bytes from rank 0.
    pub(super) fn creation_tag(&self) -> Option<u64> {
        self.creation_tag
    }

    pub(super) fn group(&self) -> GroupId {
        self.group
    }

    /// Number of ranks.
    pub(super) fn len(&self) -> usize {
        self.peers.len()
    }

    /// Rank in the job of a rank of the group.
    pub(super) fn in_job(&self, rank: usize) -> usize {
        self.peers[rank].rank
    }

    /// Writes as many bytes to rank `to` of the group as fit.
    pub(super) fn write(
        &mut self,
        calls: &Calls,
        announcements: &Announcements,
        to: usize,
        bytes: &[u8],
    ) -> Result<usize, Lost> {
        if let Some(why) = &self.peers[to].lost {
            return Err(Lost { peer: to, why: why.clone() });
        }
        let written = self.opened(calls, announcements, to).and_then(|(stream, requests)| {
            if bytes.is_empty() { Ok(0) } else { stream.write(calls, requests, bytes) }
        });
        written.map_err(|fault| self.lose(to, fault.into()))
    }

    /// Returns the oldest bytes from rank `from` of the group.
    pub(super) fn arrived(&self, from: usize) -> &[u8] {
        self.peers[from].incoming.as_ref().map_or(&[], IncomingTiles::bytes)
    }

    /// Consumes bytes from rank `from`. An error is kept for [`next_lost`](Self::next_lost).
    pub(super) fn consume(&mut self, calls: &Calls, from: usize, len: usize) {
        let peer = &mut self.peers[from];
        let result = match &mut peer.incoming {
            Some(stream) => stream.consume(calls, &mut self.requests, len),
            None => {
                assert!(len == 0, "{len} bytes cannot be consumed: none have arrived");
                Ok(())
            }
        };
        if let Err(fault) = result {
            peer.lost.get_or_insert(fault.into());
        }
    }

    /// Moves what MPI has: opens announced streams, sends unfinished tiles, tests all requests. Returns true if anything moved.
    pub(super) fn poll(&mut self, calls: &Calls, announcements: &Announcements) -> Result<bool, CallFault> {
        let opened = self.unannounced > 0 && self.open_announced(calls, announcements)?;
        let sent = self.flush(calls);
        let GroupStreams { requests, peers, owners, .. } = self;
        let ended = calls.test(requests, |ended| take(peers, owners, ended))?;
        self.find_ends(calls);
        Ok(opened || sent || ended)
    }

    /// Returns the next loss that the caller does not know of; the end of a stream only after its last byte was consumed.
    pub(super) fn next_lost(&mut self) -> Option<Lost> {
        let (peer, found) = self.peers.iter_mut().enumerate().find(|(_, p)| p.lost.is_some() && !p.told)?;
        found.told = true;
        found.lost.clone().map(|why| Lost { peer, why })
    }

    /// Marks a stream as ended, for a reason that the caller gets at once.
    pub(super) fn lose(&mut self, peer: usize, why: LostWhy) -> Lost {
        let lost = &mut self.peers[peer];
        lost.told = true;
        Lost { peer, why: lost.lost.get_or_insert(why).clone() }
    }

    /// Ends all outgoing streams behind what was written.
    pub(super) fn finish(&mut self) {
        self.peers.iter_mut().filter_map(|peer| peer.outgoing.as_mut()).for_each(Outgoing::finish);
    }

    /// Polls streams that have no reader any more: discards what arrives. Returns true once both directions of all have ended.
    pub(super) fn discard(&mut self, calls: &Calls, announcements: &Announcements) -> bool {
        let polled = self.poll(calls, announcements);
        for peer in 0..self.peers.len() {
            while !self.arrived(peer).is_empty() {
                self.consume(calls, peer, self.arrived(peer).len());
            }
        }
        polled.is_ok() && self.requests.are_free() && self.peers.iter().all(|p| p.is_finished(&self.requests))
    }

    /// Returns the outgoing stream to `to`, opened if this is its first use.
    fn opened(
        &mut self,
        calls: &Calls,
        announcements: &Announcements,
        to: usize,
    ) -> Result<(&mut Outgoing, &mut Requests), CallFault> {
        let GroupStreams { group, requests, peers, owners, creation_tag, .. } = self;
        let peer = &mut peers[to];
        let stream = match peer.outgoing.take() {
            Some(stream) => stream,
            None => {
                let tag = announcements.new_tag()?;
                owners.push(Owner::Outgoing(to));
                let tags = StreamTags { stream: tag, creation: creation_tag.unwrap_or_default() };
                let first = announcements.announcement(*group, tags);
                Outgoing::open(calls, requests, (peer.rank, tag), (&first, announcements::TAG))?
            }
        };
        Ok((peer.outgoing.insert(stream), requests))
    }

    fn open_announced(&mut self, calls: &Calls, announcements: &Announcements) -> Result<bool, CallFault> {
        announcements.receive(calls)?;
        let before = self.unannounced;
        for (idx, peer) in self.peers.iter_mut().enumerate().filter(|(_, peer)| peer.incoming.is_none()) {
            match announcements.take(self.group, peer.rank) {
                Ok(Some(tags)) => {
                    self.owners.push(Owner::IncomingTiles(idx));
                    let address = (peer.rank, tags.stream);
                    peer.incoming = Some(IncomingTiles::open(calls, &mut self.requests, address)?);
                    if idx == 0 {
                        self.creation_tag = Some(tags.creation);
                    }
                    self.unannounced -= 1;
                }
                Ok(None) => {}
                Err(fault) => drop(peer.lost.get_or_insert(fault.into())),
            }
        }
        Ok(self.unannounced < before)
    }

    fn flush(&mut self, calls: &Calls) -> bool {
        let mut sent = false;
        for peer in &mut self.peers {
            match peer.outgoing.as_mut().map_or(Ok(false), |out| out.flush(calls, &mut self.requests)) {
                Ok(one) => sent |= one,
                Err(fault) => drop(peer.lost.get_or_insert(fault.into())),
            }
        }
        sent
    }

    fn find_ends(&mut self, calls: &Calls) {
        for peer in &mut self.peers {
            match peer.incoming.as_mut().map_or(Ok(false), |stream| stream.end(calls, &mut self.requests)) {
                Ok(false) => {}
                Ok(true) => drop(peer.lost.get_or_insert(LostWhy::Closed)),
                Err(fault) => drop(peer.lost.get_or_insert(fault.into())),
            }
        }
    }
}

/// Passes an ended request to its stream.
fn take(peers: &mut [PeerStreams], owners: &[Owner], ended: Ended) {
    let (Owner::Outgoing(idx) | Owner::IncomingTiles(idx)) = owners[ended.slot / TILES];
    let peer = &mut peers[idx];
    if let Err(fault) = ended.result {
        // A receive that was cancelled at the end of a stream may end with an error.
        peer.lost.get_or_insert(fault.into());
    } else if let (Owner::IncomingTiles(_), Some(stream)) = (owners[ended.slot / TILES], &mut peer.incoming)
        && let Some(tile) = stream.tile_of(ended.slot)
    {
        stream.arrive(tile, ended.len);
    }
}

impl PeerStreams {
    fn is_finished(&self, requests: &Requests) -> bool {
        self.outgoing.as_ref().is_none_or(|stream| stream.is_finished(requests))
            && self.incoming.as_ref().is_none_or(|stream| stream.is_finished(requests))
    }
}

impl Drop for GroupStreams {
    fn drop(&mut self) {
        if !self.requests.are_free() {
            std::mem::forget(std::mem::take(&mut self.peers));
        }
    }
}

impl From<CallFault> for LostWhy {
    fn from(fault: CallFault) -> Self {
        LostWhy::System { what: fault.call, message: fault.message }
    }
}
