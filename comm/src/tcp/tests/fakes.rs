//! Transport in the memory of one process, for tests of what is built over transports.

use crate::p2p::transport::{Lost, LostWhy, Source, Target, Transport, Waker};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Stream: from, to (`None` for the common one as `to` reads it), and the group's path.
type Key = (Vec<u64>, usize, usize, bool);

/// Bytes on the way between all ranks, and ranks that were lost.
#[derive(Debug, Default)]
struct Network {
    streams: Mutex<HashMap<Key, Vec<u8>>>,
    lost: Mutex<Vec<usize>>,
    news: Condvar,
}

#[derive(Debug)]
pub(super) struct Fake {
    network: Arc<Network>,
    path: Vec<u64>,
    rank: usize,
    members: Vec<usize>,
    audience: Vec<usize>,
    arrived: HashMap<StreamKey, Vec<u8>>,
    reported: Vec<usize>,
}

/// Source as a key: the rank, and true for its common stream.
type StreamKey = (usize, bool);

/// Loses a rank of the fakes, for all others.
pub(super) struct Loss(Arc<Network>);

impl Loss {
    pub(super) fn of(&self, rank: usize) {
        self.0.lost.lock().unwrap().push(rank);
        self.0.news.notify_all();
    }
}

impl Fake {
    /// Transports of `n` ranks; with `common`, each has the others as its audience.
    pub(super) fn group(n: usize, common: bool) -> (Vec<Self>, Loss) {
        let network: Arc<Network> = Arc::default();
        let make = |rank| Fake::new(&network, Vec::new(), rank, (0..n).collect(), common);
        ((0..n).map(make).collect(), Loss(Arc::clone(&network)))
    }

    fn new(network: &Arc<Network>, path: Vec<u64>, rank: usize, members: Vec<usize>, common: bool) -> Self {
        let others = (0..members.len()).filter(|other| *other != rank && common);
        let (audience, network) = (others.collect(), Arc::clone(network));
        Fake { network, path, rank, members, audience, arrived: HashMap::new(), reported: Vec::new() }
    }

    fn put(&self, to: usize, common: bool, bytes: &[u8]) {
        let key = (self.path.clone(), self.members[self.rank], self.members[to], common);
        self.network.streams.lock().unwrap().entry(key).or_default().extend(bytes);
        self.network.news.notify_all();
    }

    fn key(from: Source) -> StreamKey {
        match from {
            Source::Rank(rank) => (rank, false),
            Source::Common(rank) => (rank, true),
        }
    }
}

impl Transport for Fake {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    fn audience(&self) -> &[usize] {
        &self.audience
    }

    fn write(&mut self, to: Target, bytes: &[u8]) -> Result<usize, Lost> {
        // Never all at once.
        let bytes = &bytes[..bytes.len().min(1000)];
        match to {
            Target::Rank(rank) => self.put(rank, false, bytes),
            Target::Audience => self.audience.iter().for_each(|rank| self.put(*rank, true, bytes)),
        }
        Ok(bytes.len())
    }

    fn progress(&mut self) -> Result<bool, Lost> {
        let lost = self.network.lost.lock().unwrap().clone();
        let new = |rank: &usize| lost.contains(&self.members[*rank]) && !self.reported.contains(rank);
        if let Some(peer) = (0..self.members.len()).find(new) {
            self.reported.push(peer);
            return Err(Lost { peer, why: LostWhy::Closed });
        }
        let (mut moved, me) = (false, self.members[self.rank]);
        let mut streams = self.network.streams.lock().unwrap();
        for ((path, from, to, common), bytes) in streams.iter_mut() {
            if *path == self.path && *to == me && !bytes.is_empty() {
                let from = self.members.iter().position(|member| member == from).unwrap();
                self.arrived.entry((from, *common)).or_default().append(bytes);
                moved = true;
            }
        }
        Ok(moved)
    }

    fn arrived(&self, from: Source) -> &[u8] {
        self.arrived.get(&Self::key(from)).map_or(&[], Vec::as_slice)
    }

    fn consume(&mut self, from: Source, len: usize) {
        if len > 0 {
            self.arrived.get_mut(&Self::key(from)).unwrap().drain(..len);
        }
    }

    fn wait(&mut self, at_most: Duration) -> Result<(), Lost> {
        let streams = self.network.streams.lock().unwrap();
        drop(self.network.news.wait_timeout(streams, at_most).unwrap());
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Waker> {
        Arc::<Network>::clone(&self.network)
    }

    fn split(&mut self, members: &[usize], channel: u64) -> Result<Box<dyn Transport>, Lost> {
        let path = [&self.path[..], &[channel]].concat();
        let rank = members.iter().position(|member| *member == self.rank).unwrap();
        let members = members.iter().map(|member| self.members[*member]).collect();
        let common = !self.audience.is_empty();
        Ok(Box::new(Fake::new(&self.network, path, rank, members, common)))
    }

    fn close(&mut self) {}
}

impl Waker for Network {
    fn wake(&self) {
        self.news.notify_all();
    }
}
