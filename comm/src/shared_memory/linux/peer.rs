//! One peer of a rank: its memory, this rank's places in its streams, and its end.

use super::bell::Bell;
use super::cursor::{AckCursor, Impossible, ReadCursor};
use super::layout::{Ack, Layout, RingStream};
use super::link::{Intro, Letter, Link, Received};
use super::region::Region;
use super::sleep_word::{self, News};
use crate::p2p::transport::{Lost, LostWhy};
use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

/// Peer of a rank.
#[derive(Debug)]
pub(super) struct MemoryPeer {
    /// Rank of the peer.
    rank: usize,
    /// Socket of the pair; its end is the peer's.
    link: Option<Arc<Link>>,
    /// Introduction that this rank waits for.
    expected: Option<Expected>,
    /// Link on which the introduction arrived, until the sleeper stops watching it.
    met_on: Option<Arc<Link>>,
    memory: Option<PeerMemory>,
    single: IncomingRing,
    common: IncomingRing,
    single_ack: AckCursor,
    common_ack: AckCursor,
    end: PeerEnd,
    altered: Cell<bool>,
    altered_reported: bool,
}

/// Introduction that arrives on the link of the group that was split.
#[derive(Debug)]
pub(super) struct Expected {
    pub(super) parent: Arc<Link>,
    pub(super) intro: Intro,
}

/// Mapped memory of the peer, and its bell.
#[derive(Debug)]
struct PeerMemory {
    region: Region,
    bell: Bell,
    /// Last sleep of the peer that this rank ended.
    rung: u64,
}

/// PeerEnd of a peer's streams.
#[derive(Debug, PartialEq, Eq)]
enum PeerEnd {
    None,
    /// The peer ended; bytes that it wrote may be unread.
    Unreported(LostWhy),
    Reported(LostWhy),
}

/// Stream that the peer writes and this rank reads.
#[derive(Debug)]
struct IncomingRing {
    stream: RingStream,
    cursor: ReadCursor,
    /// Offset of the acknowledgement in this rank's region.
    ack: usize,
}

impl IncomingRing {
    fn new(layout: &Layout, stream: RingStream, writer: usize) -> Self {
        let ack = layout.ack(Ack { writer, common: stream == RingStream::Common });
        IncomingRing { stream, cursor: ReadCursor::new(layout.capacity(stream)), ack }
    }

    fn advance(&self, region: &Region) -> Result<bool, Impossible> {
        // Acquire: the bytes before this position are visible.
        self.cursor.advance(region.word(region.layout().written(self.stream)).load(Acquire))
    }
}

impl MemoryPeer {
    /// Returns the peer `rank` of the rank `own`. Its memory follows by [`attach`](MemoryPeer::attach) or with the expected introduction.
    pub(super) fn new(rank: usize, own: usize, layout: &Layout, link: Option<Arc<Link>>) -> Self {
        MemoryPeer {
            rank,
            link,
            expected: None,
            met_on: None,
            memory: None,
            single: IncomingRing::new(layout, RingStream::To(own), rank),
            common: IncomingRing::new(layout, RingStream::Common, rank),
            single_ack: AckCursor::default(),
            common_ack: AckCursor::default(),
            end: PeerEnd::None,
            altered: Cell::new(false),
            altered_reported: false,
        }
    }

    pub(super) fn expecting(self, expected: Expected) -> Self {
        MemoryPeer { expected: Some(expected), ..self }
    }

    pub(super) fn attach(&mut self, region: Region, bell: Bell) {
        self.memory = Some(PeerMemory { region, bell, rung: u64::MAX });
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn is_expected(&self) -> bool {
        self.expected.is_some()
    }

    /// Returns the socket of the pair; takes the introduction that brings it if needed. A rank that has left may have made a group
    /// before, so its introduction to that one may still be in the socket.
    pub(super) fn met_link(&mut self) -> Result<Arc<Link>, Lost> {
        self.meet();
        let left =
            matches!(&self.end, PeerEnd::Unreported(why) | PeerEnd::Reported(why) if *why == LostWhy::Closed);
        if !left || self.altered.get() {
            self.check()?;
        }
        let absent = || self.lost(system("splitting a group", "the rank has not made the group".to_owned()));
        self.link.clone().ok_or_else(absent)
    }

    /// Returns the socket that the sleeper watches: the link where the introduction arrives, then the pair's own.
    pub(super) fn watched(&self) -> Option<&Arc<Link>> {
        self.expected.as_ref().map(|expected| &expected.parent).or(self.link.as_ref())
    }

    /// Returns the link that need not be watched any more, once, after the introduction arrived on it.
    pub(super) fn met_on(&mut self) -> Option<Arc<Link>> {
        self.met_on.take()
    }

    /// Notes that the watched socket reached its end. While an introduction is expected, `meet` finds that end behind it.
    pub(super) fn hung_up(&mut self) {
        if self.expected.is_none() {
            self.finish(LostWhy::Closed);
        }
    }

    /// Takes the introduction if it has arrived, and returns true if so.
    pub(super) fn meet(&mut self) -> bool {
        let Some(Expected { parent, intro }) = &self.expected else { return false };
        let (received, intro) = (parent.receive(intro.channel), *intro);
        let result = match received {
            Ok(Received::Nothing) => return false,
            Ok(Received::PeerEnd) => Err(LostWhy::Closed),
            Ok(Received::Garbage) => Err(LostWhy::Altered),
            Ok(Received::Letter(letter)) if !intro.equals(&letter) => Err(LostWhy::Altered),
            Ok(Received::Letter(letter)) => self.accept(letter, &intro),
            Err(error) => Err(system("receiving an introduction", error.to_string())),
        };
        self.met_on = self.expected.take().map(|expected| expected.parent);
        if let Err(why) = result {
            self.finish(why);
        }
        true
    }

    fn accept(&mut self, letter: Letter, intro: &Intro) -> Result<(), LostWhy> {
        let mut files = letter.files.into_iter();
        let (Some(memory), Some(event)) = (files.next(), files.next()) else { return Err(LostWhy::Altered) };
        if self.link.is_none() {
            let socket: OwnedFd = files.next().ok_or(LostWhy::Altered)?;
            self.link = Some(Arc::new(Link::new(socket)));
        }
        let region = Region::attach(memory.as_fd(), intro.layout, intro.to)
            .map_err(|fault| system("mapping its memory", fault.to_string()))?;
        self.attach(region, Bell::received(event));
        Ok(())
    }

    /// Looks for new bytes and for the peer's end; returns true for new ones.
    pub(super) fn look(&mut self) -> bool {
        let met = self.meet();
        let Some(PeerMemory { region, .. }) = &self.memory else { return met };
        // The end is read first: bytes that were written before it are then visible.
        let closed = region.word(region.layout().closed()).load(Acquire) != 0;
        let single = self.single.advance(region).unwrap_or_else(|Impossible| self.alter());
        let common = self.common.advance(region).unwrap_or_else(|Impossible| self.alter());
        if closed {
            self.finish(LostWhy::Closed);
        }
        met || single || common
    }

    /// Returns bytes of one of the peer's streams.
    pub(super) fn arrived(&self, common: bool) -> &[u8] {
        let Some(PeerMemory { region, .. }) = &self.memory else { return &[] };
        let incoming = self.incoming(common);
        if incoming.advance(region).is_err() {
            self.alter();
        }
        let (position, ready) = (incoming.cursor.position(), incoming.cursor.ready());
        // SAFETY: the writer overwrites a byte after this rank's acknowledgement of it alone, which `consume` publishes, and `consume`
        // needs `&mut self`, so the slice is gone then. This relies on the peer's program: it holds the job's token.
        unsafe { region.bytes(incoming.stream, position, ready) }
    }

    /// Consumes bytes: returns the offset of the acknowledgement and its new value.
    pub(super) fn consume(&mut self, common: bool, len: usize) -> (usize, u64) {
        if len > self.incoming(common).cursor.ready() {
            self.arrived(common);
        }
        let incoming = if common { &mut self.common } else { &mut self.single };
        (incoming.ack, incoming.cursor.consume(len))
    }

    fn incoming(&self, common: bool) -> &IncomingRing {
        if common { &self.common } else { &self.single }
    }

    /// Returns the peer's position in a stream that this rank, `own`, has written up to `written`.
    pub(super) fn acked(&mut self, own: usize, common: bool, written: u64) -> u64 {
        let cursor = if common { &mut self.common_ack } else { &mut self.single_ack };
        if let Some(PeerMemory { region, .. }) = &self.memory {
            let word = region.word(region.layout().ack(Ack { writer: own, common }));
            // Acquire: the peer's reads are over before this rank writes over what they read.
            if cursor.advance(word.load(Acquire), written).is_err() {
                self.altered.set(true);
            }
        }
        cursor.position()
    }

    /// Wakes the peer if it sleeps. The caller has published the news.
    pub(super) fn tell(&mut self, news: News) {
        self.meet();
        if let Some(PeerMemory { region, bell, rung }) = &mut self.memory {
            sleep_word::tell(region.word(region.layout().sleep()), rung, news, || bell.ring());
        }
    }

    /// Notes that the peer ended.
    pub(super) fn finish(&mut self, why: LostWhy) {
        if self.end == PeerEnd::None {
            self.end = PeerEnd::Unreported(why);
        }
    }

    /// Returns the reason why nothing can be written to the peer.
    pub(super) fn check(&self) -> Result<(), Lost> {
        match &self.end {
            _ if self.altered.get() => Err(self.lost(LostWhy::Altered)),
            PeerEnd::None => Ok(()),
            PeerEnd::Unreported(why) | PeerEnd::Reported(why) => Err(self.lost(why.clone())),
        }
    }

    /// Returns true if the loss of the peer was reported.
    pub(super) fn is_reported(&self) -> bool {
        self.altered_reported || matches!(self.end, PeerEnd::Reported(_))
    }

    /// Returns an unreported loss, each once: altered positions at once, an end when all bytes before it are consumed or
    /// the caller does not wait for that.
    pub(super) fn unreported(&mut self, with_bytes: bool) -> Option<Lost> {
        if self.altered.get() {
            let first = !std::mem::replace(&mut self.altered_reported, true);
            return first.then(|| self.lost(LostWhy::Altered));
        }
        let PeerEnd::Unreported(why) = &self.end else { return None };
        let drained = with_bytes || self.arrived(true).is_empty() && self.arrived(false).is_empty();
        let why = drained.then(|| why.clone())?;
        self.end = PeerEnd::Reported(why.clone());
        Some(self.lost(why))
    }

    fn lost(&self, why: LostWhy) -> Lost {
        Lost { peer: self.rank, why }
    }

    /// Notes an impossible position; returns false, for it brings no bytes.
    fn alter(&self) -> bool {
        self.altered.set(true);
        false
    }
}

/// Reason for a loss: the system refused `what`.
pub(super) fn system(what: &'static str, message: String) -> LostWhy {
    LostWhy::System { what, message }
}
