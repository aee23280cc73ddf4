//! All streams of a rank, in both directions.

use super::cause::{Cause, Progress};
use super::codec::{self, FrameKind};
use super::hosts::Hosts;
use super::inbox::{Inbox, Notes};
use super::outbox::Outbox;
use super::transport::{Lost, LostWhy, Source, Target, Transport};
use std::time::Duration;

/// A rank's streams to and from the others of its group.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) transport: Box<dyn Transport>,
    pub(super) rank: usize,
    pub(super) hosts: Hosts,
    /// By rank; this rank's own is not used.
    pub(super) peers: Vec<PeerLinks>,
    pub(super) outboxes: Vec<Outbox>,
    /// To the audience, if it has any rank.
    pub(super) common: Outbox,
}

/// Incoming streams of one rank, and its notes.
#[derive(Debug)]
pub(super) struct PeerLinks {
    pub(super) own: Inbox,
    pub(super) common: Inbox,
    /// True if the rank is in the audience of this one, and the other way round.
    pub(super) in_audience: bool,
    pub(super) notes: Notes,
    /// Reason why the rank cannot be reached any more.
    pub(super) lost: Option<LostWhy>,
}

impl PeerLinks {
    /// The rank's call that no operation has taken.
    pub(super) fn call(&self) -> Option<&super::cause::WireCall> {
        self.inbox_with_call().and_then(|inbox| inbox.call.as_ref())
    }

    /// Stream of the rank's earliest call: a rank that has completed a collective may have called a send or a receive since.
    pub(super) fn inbox_with_call(&self) -> Option<&Inbox> {
        let inboxes = [&self.own, &self.common].into_iter().filter(|inbox| inbox.call.is_some());
        inboxes.min_by_key(|inbox| inbox.call.as_ref().map(|call| call.called.op_number))
    }

    /// Takes the rank's earliest call.
    pub(super) fn take_call(&mut self) {
        self.notes.progress = Progress::default();
        let of_own = matches!(self.inbox_with_call(), Some(Inbox { source: Source::Rank(_), .. }));
        if of_own {
            self.own.take_call();
            self.notes.relays.clear();
        } else {
            self.common.take_call();
        }
    }
}

impl Links {
    /// Opens the streams of a group. The transport's audience shares this rank's host.
    pub(super) fn new(transport: Box<dyn Transport>, hosts: Hosts) -> Self {
        let (rank, world_size) = (transport.rank(), transport.world_size());
        let peer = |peer| PeerLinks {
            own: Inbox::new(Source::Rank(peer)),
            common: Inbox::new(Source::Common(peer)),
            in_audience: transport.audience().contains(&peer),
            notes: Notes::default(),
            lost: None,
        };
        let peers = (0..world_size).map(peer).collect();
        let outboxes = (0..world_size).map(|peer| Outbox::new(Target::Rank(peer))).collect();
        let mut common = Outbox::new(Target::Audience);
        if transport.audience().is_empty() {
            common.end();
        }
        Links { transport, rank, hosts, peers, outboxes, common }
    }

    pub(super) fn world_size(&self) -> usize {
        self.peers.len()
    }

    /// Returns the other ranks.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.peers.len()).filter(move |peer| *peer != rank)
    }

    /// Writes what fits, and reads what has arrived. Returns true if anything moved.
    pub(super) fn poll(&mut self) -> bool {
        let mut moved = self.flush();
        match self.transport.progress() {
            Ok(progress) => moved |= progress,
            Err(lost) => moved |= self.lose(lost),
        }
        for peer in self.others() {
            moved |= self.read(peer);
        }
        moved
    }

    fn flush(&mut self) -> bool {
        let mut moved = false;
        for peer in self.others() {
            match self.outboxes[peer].flush(&mut *self.transport) {
                Ok(written) => moved |= written,
                Err(lost) => moved |= self.lose(lost),
            }
        }
        match self.common.flush(&mut *self.transport) {
            Ok(written) => moved | written,
            Err(lost) => moved | self.lose(lost),
        }
    }

    fn read(&mut self, peer: usize) -> bool {
        let PeerLinks { own, common, in_audience, notes, .. } = &mut self.peers[peer];
        let read = own.advance(&mut *self.transport, notes);
        let read = match read {
            Ok(read) if *in_audience => common.advance(&mut *self.transport, notes).map(|more| read | more),
            other => other,
        };
        read.unwrap_or_else(|lost| self.lose(lost))
    }

    /// Records that a rank cannot be reached any more; returns true if that is new.
    pub(super) fn lose(&mut self, lost: Lost) -> bool {
        let Some(peer) = self.peers.get_mut(lost.peer) else { return false };
        self.outboxes[lost.peer].end();
        let new = peer.lost.is_none();
        if lost.why == LostWhy::Altered {
            peer.own.drain();
            peer.common.drain();
        }
        peer.lost.get_or_insert(lost.why);
        new
    }

    /// Returns true if nothing more will come from a rank.
    pub(super) fn is_dry(&self, peer: usize) -> bool {
        let PeerLinks { lost, own, common, .. } = &self.peers[peer];
        let empty = |inbox: &Inbox| self.transport.arrived(inbox.source).is_empty();
        match lost {
            None => false,
            Some(LostWhy::Altered) => true,
            Some(_) => empty(own) && (!self.peers[peer].in_audience || empty(common)),
        }
    }

    /// Returns true if nothing waits to be written.
    pub(super) fn is_flushed(&self) -> bool {
        self.common.is_idle() && self.others().all(|peer| self.outboxes[peer].is_idle())
    }

    /// Waits until something may move, at most `at_most`.
    pub(super) fn wait(&mut self, at_most: Duration) {
        if let Err(lost) = self.transport.wait(at_most) {
            self.lose(lost);
        }
    }

    /// Writes a frame to the audience and to each rank outside of it.
    pub(super) fn tell_all(&mut self, put: impl Fn(&mut Vec<u8>, Option<usize>)) {
        if !self.common.has_ended() {
            put(self.common.frames(), None);
        }
        for peer in self.others() {
            if !self.peers[peer].in_audience && !self.outboxes[peer].has_ended() {
                put(self.outboxes[peer].frames(), Some(peer));
            }
        }
    }

    /// Writes a failure to every rank by its own stream, which no other rank can block.
    pub(super) fn flood(&mut self, at: u64, cause: &Cause) {
        let mut body = Vec::new();
        cause.put(&mut body);
        for peer in self.others() {
            if self.outboxes[peer].has_ended() {
                continue;
            }
            codec::frame(self.outboxes[peer].frames(), FrameKind::Failed, |out| {
                codec::put_u64(out, at);
                out.extend_from_slice(&body);
            });
        }
    }

    /// Drops what has arrived for operations, now and later.
    pub(super) fn drain(&mut self) {
        for peer in &mut self.peers {
            peer.own.drain();
            peer.common.drain();
        }
    }

    /// Forgets the memory of the operation that ends.
    pub(super) fn abandon_spans(&mut self) {
        self.outboxes.iter_mut().for_each(Outbox::abandon);
        self.common.abandon();
    }
}
