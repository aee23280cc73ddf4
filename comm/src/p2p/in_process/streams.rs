//! Transport between threads of one process.

use super::pipes::{Pipe, Pipes};
use crate::p2p::hosts::Hosts;
use crate::p2p::transport::{Lost, LostWhy, Source, Target, Transport, Waker};
use std::sync::Arc;
use std::time::Duration;

/// One rank's streams.
#[derive(Debug)]
pub(super) struct ThreadStreams {
    rank: usize,
    pipes: Arc<Pipes>,
    audience: Vec<usize>,
    /// Bytes that have arrived, by rank and by kind of stream.
    arrived: Vec<[Arrived; 2]>,
    /// True for each rank after its end has been reported.
    lost: Vec<bool>,
    /// How often the bell had rung at the end of the last wait.
    seen: u64,
}

#[derive(Debug, Default)]
struct Arrived {
    bytes: Vec<u8>,
    consumed: usize,
}

/// Returns the transports of all ranks of a world. Ranks of one host have common streams.
pub(in crate::p2p) fn world(ranks: usize, room: usize, hosts: Hosts) -> Vec<Box<dyn Transport>> {
    let pipes = Pipes::new(ranks, room, hosts);
    (0..ranks).map(|rank| Box::new(ThreadStreams::new(Arc::clone(&pipes), rank)) as _).collect()
}

impl ThreadStreams {
    fn new(pipes: Arc<Pipes>, rank: usize) -> Self {
        let near = |other: &usize| *other != rank && pipes.hosts.share(rank, *other);
        let audience = (0..pipes.ranks).filter(near).collect();
        let arrived = (0..pipes.ranks).map(|_| Default::default()).collect();
        ThreadStreams { rank, audience, arrived, lost: vec![false; pipes.ranks], seen: 0, pipes }
    }

    fn at(&self, from: Source) -> &Arrived {
        match from {
            Source::Rank(peer) => &self.arrived[peer][0],
            Source::Common(peer) => &self.arrived[peer][1],
        }
    }

    fn write_to(&self, peers: &[usize], common: bool, bytes: &[u8]) -> Result<usize, Lost> {
        let pipe = |peer: usize| self.pipes.pipe(self.rank, peer, common);
        // A rank that is lost does not keep the others from reading the common stream.
        let reads = |peer: &&usize| !common || !self.lost[**peer];
        let mut len = bytes.len();
        for &peer in peers.iter().filter(reads) {
            len = len.min(pipe(peer).room(self.pipes.room).ok_or(closed(peer))?);
        }
        if len > 0 {
            for &peer in peers.iter().filter(reads) {
                pipe(peer).put(&bytes[..len], self.pipes.room);
                self.pipes.bell(peer).wake();
            }
        }
        Ok(len)
    }

    /// Takes what `peer` has written; returns the number of bytes, or `None` if no more will come.
    fn take(&mut self, peer: usize) -> Option<usize> {
        let mut taken = 0;
        let mut open = false;
        for common in [false, true] {
            let Arrived { bytes, consumed } = &mut self.arrived[peer][usize::from(common)];
            if *consumed == bytes.len() {
                bytes.clear();
                *consumed = 0;
            }
            let pipe: &Pipe = self.pipes.pipe(peer, self.rank, common);
            let room = self.pipes.room - bytes.len();
            bytes.reserve_exact(room);
            if let Some(len) = pipe.take(bytes, room) {
                taken += len;
                open = true;
            }
        }
        if taken > 0 {
            self.pipes.bell(peer).wake();
        }
        open.then_some(taken)
    }
}

fn closed(peer: usize) -> Lost {
    Lost { peer, why: LostWhy::Closed }
}

impl Transport for ThreadStreams {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.pipes.ranks
    }

    fn audience(&self) -> &[usize] {
        &self.audience
    }

    fn write(&mut self, to: Target, bytes: &[u8]) -> Result<usize, Lost> {
        match to {
            Target::Rank(peer) => self.write_to(&[peer], false, bytes),
            Target::Audience => self.write_to(&self.audience, true, bytes),
        }
    }

    fn progress(&mut self) -> Result<bool, Lost> {
        let (mut moved, mut lost) = (false, None);
        for peer in 0..self.pipes.ranks {
            if peer == self.rank || self.lost[peer] {
                continue;
            }
            match self.take(peer) {
                Some(taken) => moved |= taken > 0,
                None => {
                    self.lost[peer] = lost.is_none();
                    lost.get_or_insert(closed(peer));
                }
            }
        }
        lost.map_or(Ok(moved), Err)
    }

    fn arrived(&self, from: Source) -> &[u8] {
        let Arrived { bytes, consumed } = self.at(from);
        &bytes[*consumed..]
    }

    fn consume(&mut self, from: Source, len: usize) {
        assert!(len <= self.arrived(from).len(), "more bytes than have arrived");
        match from {
            Source::Rank(peer) => self.arrived[peer][0].consumed += len,
            Source::Common(peer) => self.arrived[peer][1].consumed += len,
        }
    }

    fn wait(&mut self, at_most: Duration) -> Result<(), Lost> {
        self.seen = self.pipes.bell(self.rank).wait(self.seen, at_most);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Waker> {
        Arc::clone(self.pipes.bell(self.rank)) as _
    }

    fn split(&mut self, members: &[usize], channel: u64) -> Result<Box<dyn Transport>, Lost> {
        let pipes = self.pipes.join(members, channel);
        let rank = members.iter().position(|member| *member == self.rank);
        Ok(Box::new(ThreadStreams::new(pipes, rank.unwrap_or(0))))
    }

    fn close(&mut self) {
        for peer in (0..self.pipes.ranks).filter(|peer| *peer != self.rank) {
            for common in [false, true] {
                self.pipes.pipe(self.rank, peer, common).close();
                self.pipes.pipe(peer, self.rank, common).close();
            }
            self.pipes.bell(peer).wake();
        }
    }
}

impl Drop for ThreadStreams {
    fn drop(&mut self) {
        self.close();
    }
}
