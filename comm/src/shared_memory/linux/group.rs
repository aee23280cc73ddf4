//! One rank of a group: its region, its peers, and the transport that they form.

use super::bell::Bell;
use super::cursor::WriteCursor;
use super::layout::{Layout, RingStream};
use super::peer::MemoryPeer;
use super::region::Region;
use super::sleep_word::{self, News, publish};
use super::sleeper::Sleeper;
use super::windows::WindowList;
use crate::p2p::transport::{Lost, LostWhy, Source, Target, Transport, Waker, WindowAllocator, Windows};
use std::sync::Arc;
use std::time::Duration;

/// Bytes that are published together: readers start with the first piece of a long write while the next one is copied.
const PIECE: usize = 1 << 16;
/// Looks at the words before a sleep. Ranks can outnumber the cores, so each look gives the core away.
const LOOKS: usize = 8;

/// Transport between processes of one host. See the [module](super) for its guarantees.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    rank: usize,
    own: Region,
    /// Peers by rank; none in this rank's own place, and none after the close.
    peers: Vec<Option<MemoryPeer>>,
    audience: Vec<usize>,
    /// Streams to one reader, by rank.
    singles: Vec<WriteCursor>,
    common: WriteCursor,
    sleeper: Sleeper,
    /// True if a wait saw news that `progress` has not reported.
    news: bool,
    /// Registered memory.
    pub(super) windows: Arc<WindowList>,
}

impl SharedMemory {
    pub(super) fn new(
        rank: usize,
        own: Region,
        peers: Vec<Option<MemoryPeer>>,
        bell: Arc<Bell>,
    ) -> rustix::io::Result<Self> {
        let layout = *own.layout();
        let cursor = |stream| WriteCursor::new(layout.capacity(stream));
        Ok(SharedMemory {
            rank,
            own,
            sleeper: Sleeper::new(bell, &peers)?,
            peers,
            audience: (0..layout.world_size).filter(|&other| other != rank).collect(),
            singles: (0..layout.world_size).map(|reader| cursor(RingStream::To(reader))).collect(),
            common: cursor(RingStream::Common),
            news: false,
            windows: Arc::new(WindowList::new(rank)),
        })
    }

    pub(super) fn layout(&self) -> &Layout {
        self.own.layout()
    }

    pub(super) fn peer_mut(&mut self, rank: usize) -> Result<&mut MemoryPeer, Lost> {
        assert_ne!(rank, self.rank, "rank {rank} has no stream to itself");
        self.peers[rank].as_mut().ok_or(Lost { peer: rank, why: LostWhy::Closed })
    }

    fn peer(&self, rank: usize) -> Result<&MemoryPeer, Lost> {
        assert_ne!(rank, self.rank, "rank {rank} has no stream to itself");
        self.peers[rank].as_ref().ok_or(Lost { peer: rank, why: LostWhy::Closed })
    }

    fn check(&self, to: Target) -> Result<(), Lost> {
        match to {
            Target::Rank(rank) => self.peer(rank)?.check(),
            Target::Audience => self.audience.iter().try_for_each(|&rank| match self.peer(rank)? {
                peer if peer.is_reported() => Ok(()),
                peer => peer.check(),
            }),
        }
    }

    fn writer(&mut self, to: Target) -> &mut WriteCursor {
        match to {
            Target::Rank(rank) => &mut self.singles[rank],
            Target::Audience => &mut self.common,
        }
    }

    /// Reads the acknowledgements of a stream; returns true if the slowest reader has advanced.
    fn acknowledge(&mut self, to: Target) -> bool {
        let (own, written) = (self.rank, self.writer(to).position());
        // A reader that was reported lost holds nobody up.
        let readers = readers(&mut self.peers, to).filter(|peer| !peer.is_reported());
        let common = to == Target::Audience;
        let acked = readers.map(|peer| peer.acked(own, common, written)).min();
        // Without readers nothing stays in the ring.
        self.writer(to).acknowledge(acked.unwrap_or(written))
    }

    /// Writes one piece, and returns its length.
    fn put(&mut self, to: Target, bytes: &[u8]) -> usize {
        if self.writer(to).room() < bytes.len() {
            self.acknowledge(to);
        }
        let len = self.writer(to).room().min(bytes.len());
        if len > 0 {
            let (stream, position) = (stream(to), self.writer(to).position());
            self.own.fill(stream, position, &bytes[..len]);
            let written = self.writer(to).advance(len);
            // A reader that sees the position sees the bytes.
            publish(self.own.word(self.own.layout().written(stream)), written);
            readers(&mut self.peers, to).for_each(|peer| peer.tell(News::Bytes));
        }
        len
    }

    /// Looks at all words of the peers that can bring news.
    fn look(&mut self) -> bool {
        let mut news = false;
        for peer in self.peers.iter_mut().flatten() {
            news |= peer.look();
            if let Some(link) = peer.met_on() {
                self.sleeper.watch_instead(&link, peer);
            }
        }
        let targets = (0..self.singles.len()).map(Target::Rank).chain([Target::Audience]);
        for to in targets {
            if self.writer(to).short && self.acknowledge(to) {
                self.writer(to).short = false;
                news = true;
            }
        }
        news
    }

    /// Returns an unreported loss. Bytes that were published before an end come first, unless the caller is about to sleep: then
    /// it can do nothing with them.
    fn report(&mut self, sleepy: bool) -> Result<(), Lost> {
        self.peers.iter_mut().flatten().find_map(|peer| peer.unreported(sleepy)).map_or(Ok(()), Err)
    }

    fn waits_for_room(&self) -> bool {
        self.common.short || self.singles.iter().any(|writer| writer.short)
    }

    /// Looks for news a few times, and lets other processes run in between.
    fn spin(&mut self) -> bool {
        (0..LOOKS).any(|_| {
            let news = self.look();
            if !news {
                std::thread::yield_now();
            }
            news
        })
    }

    /// Sleeps until a peer rings, unless news or a loss came before the peers could know of the sleep.
    fn sleep(&mut self, at_most: Duration) -> Result<(), Lost> {
        let for_room = self.waits_for_room();
        sleep_word::fall_asleep(self.own.word(self.own.layout().sleep()), for_room);
        let slept = self.sleep_without_news(at_most);
        sleep_word::wake_up(self.own.word(self.own.layout().sleep()));
        slept
    }

    fn sleep_without_news(&mut self, at_most: Duration) -> Result<(), Lost> {
        if !self.look() {
            self.report(true)?;
            let slept = self.sleeper.sleep(at_most, &mut self.peers);
            slept.map_err(|why| Lost { peer: self.rank, why })?;
            if !self.look() {
                return self.report(true);
            }
        }
        self.news = true;
        Ok(())
    }
}

impl Transport for SharedMemory {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.layout().world_size
    }

    fn audience(&self) -> &[usize] {
        &self.audience
    }

    fn write(&mut self, to: Target, bytes: &[u8]) -> Result<usize, Lost> {
        self.check(to)?;
        let mut written = 0;
        for piece in bytes.chunks(PIECE) {
            let len = self.put(to, piece);
            written += len;
            if len < piece.len() {
                break;
            }
        }
        self.writer(to).short = written < bytes.len();
        Ok(written)
    }

    fn progress(&mut self) -> Result<bool, Lost> {
        let moved = self.look() | std::mem::take(&mut self.news);
        self.report(false)?;
        Ok(moved)
    }

    fn arrived(&self, from: Source) -> &[u8] {
        let (rank, common) = origin(from);
        self.peer(rank).map_or(&[], |peer| peer.arrived(common))
    }

    fn consume(&mut self, from: Source, len: usize) {
        let (rank, common) = origin(from);
        let Some(peer) = &mut self.peers[rank] else {
            assert_eq!(len, 0, "nothing has arrived from rank {rank}");
            return;
        };
        let (ack, position) = peer.consume(common, len);
        // The reads of the bytes are over when the writer sees the position.
        publish(self.own.word(ack), position);
        peer.tell(News::Room);
    }

    fn read(&mut self, from: Source, into: &mut [u8]) -> Result<usize, Lost> {
        let arrived = self.arrived(from);
        let len = arrived.len().min(into.len());
        into[..len].copy_from_slice(&arrived[..len]);
        if len == 0 && !into.is_empty() {
            self.peer(origin(from).0)?.check()?;
        } else {
            self.consume(from, len);
        }
        Ok(len)
    }

    fn wait(&mut self, at_most: Duration) -> Result<(), Lost> {
        if self.spin() {
            self.news = true;
            return self.report(false);
        }
        self.sleep(at_most)
    }

    fn waker(&self) -> Arc<dyn Waker> {
        self.sleeper.bell()
    }

    fn split(&mut self, members: &[usize], channel: u64) -> Result<Box<dyn Transport>, Lost> {
        super::split::split(self, members, channel).map(|group| Box::new(group) as Box<dyn Transport>)
    }

    fn window_allocator(&self) -> Option<Arc<dyn WindowAllocator>> {
        Some(self.windows.clone())
    }

    fn windows(&mut self) -> Option<&mut dyn Windows> {
        Some(self)
    }

    fn close(&mut self) {
        publish(self.own.word(self.own.layout().closed()), 1);
        self.peers.iter_mut().flatten().for_each(|peer| peer.tell(News::PeerEnd));
        self.peers.fill_with(|| None);
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        self.close();
    }
}

fn stream(to: Target) -> RingStream {
    match to {
        Target::Rank(rank) => RingStream::To(rank),
        Target::Audience => RingStream::Common,
    }
}

/// Returns the peer and true for its common stream.
fn origin(from: Source) -> (usize, bool) {
    match from {
        Source::Rank(rank) => (rank, false),
        Source::Common(rank) => (rank, true),
    }
}

/// Peers that read the stream.
fn readers(peers: &mut [Option<MemoryPeer>], to: Target) -> impl Iterator<Item = &mut MemoryPeer> {
    let range = match to {
        Target::Rank(rank) => rank..rank + 1,
        Target::Audience => 0..peers.len(),
    };
    peers[range].iter_mut().flatten()
}
