//! Transport over sockets: one for each pair of ranks and group, opened on first use and polled by the caller's thread.

use super::error::Error;
use super::hello::GroupId;
use super::hub::Hub;
use super::mailbox::Mailbox;
use super::stream::RankStream;
use crate::p2p::transport::{Lost, LostWhy, Source, Target, Transport, Waker};
use mio::{Events, Poll, Token};
use std::cell::Cell;
use std::fmt;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

/// Token of the waker; others are ranks.
const WAKER: Token = Token(usize::MAX);
/// Longest wait of a handle's drop for its last operations.
const GOODBYE: Duration = Duration::from_secs(1);

/// Streams of one group.
pub(super) struct SocketStreams {
    group: GroupId,
    rank: usize,
    /// Rank in the world of each rank of the group.
    members: Vec<usize>,
    peers: Vec<StreamState>,
    /// For each rank, true once the caller has looked for bytes of it before its stream was open.
    wanted: Vec<Cell<bool>>,
    poll: Poll,
    events: Events,
    mailbox: Arc<Mailbox>,
    hub: Arc<Hub>,
}

/// State of the stream to one rank.
#[derive(Debug)]
enum StreamState {
    /// Not used yet.
    Idle,
    Opening,
    Open(Box<RankStream>),
    /// It could not be opened; `true` once the caller knows.
    Failed(LostWhy, bool),
    Closed,
}

impl SocketStreams {
    /// Streams between all ranks of the world.
    pub(super) fn world(hub: &Arc<Hub>, generation: u64) -> Result<Self, Error> {
        let members = (0..hub.world_size()).collect();
        Self::new(hub, GroupId::world(generation), hub.rank(), members)
            .map_err(Error::system("polling streams"))
    }

    fn new(hub: &Arc<Hub>, group: GroupId, rank: usize, members: Vec<usize>) -> std::io::Result<Self> {
        let poll = Poll::new()?;
        let mailbox = Arc::new(Mailbox::new(mio::Waker::new(poll.registry(), WAKER)?));
        hub.mailboxes().open(group, &mailbox);
        let peers = members.iter().map(|_| StreamState::Idle).collect();
        let wanted = members.iter().map(|_| Cell::new(false)).collect();
        let (events, hub) = (Events::with_capacity(256), Arc::clone(hub));
        Ok(SocketStreams { group, rank, members, peers, wanted, poll, events, mailbox, hub })
    }

    /// Begins to open the stream to `peer`: the lower rank of the pair calls the other.
    fn open(&mut self, peer: usize) {
        assert!(peer != self.rank, "rank {peer} has no stream to itself");
        if !matches!(self.peers[peer], StreamState::Idle) {
            return;
        }
        self.peers[peer] = StreamState::Opening;
        if self.rank < peer {
            let called = self.hub.call(self.members[peer], self.group, peer, self.rank, &self.mailbox);
            if let Err(why) = called {
                self.peers[peer] = StreamState::Failed(why, false);
            }
        }
    }

    /// Takes new connections, and opens the streams on which the caller waits.
    fn take_connections(&mut self) {
        for peer in 0..self.wanted.len() {
            if self.wanted[peer].take() {
                self.open(peer);
            }
        }
        while let Some((peer, arrival)) = self.mailbox.take() {
            self.connect(peer, arrival);
        }
    }

    fn connect(&mut self, peer: usize, arrival: super::mailbox::NewConnection) {
        // Each pair has one caller, so a second connection is none of this group.
        let expected =
            peer < self.peers.len() && matches!(self.peers[peer], StreamState::Idle | StreamState::Opening);
        if !expected || peer == self.rank {
            return;
        }
        let stream = arrival.and_then(|(connection, sealed)| {
            if sealed != self.hub.seals(self.members[peer]) {
                return Err(LostWhy::System { what: "opening the stream", message: UNLIKE.to_owned() });
            }
            let stream = RankStream::new(connection, sealed, self.poll.registry(), Token(peer));
            stream.map_err(|error| super::outbox::lost("opening the stream", &error))
        });
        self.peers[peer] = match stream {
            Ok(stream) => StreamState::Open(Box::new(stream)),
            Err(why) => StreamState::Failed(why, false),
        };
    }

    /// Polls the system, and notes the events of the streams.
    fn poll(&mut self, at_most: Duration) -> Result<(), Lost> {
        match self.poll.poll(&mut self.events, Some(at_most)) {
            Err(error) if error.kind() != ErrorKind::Interrupted => {
                let why = LostWhy::System { what: "polling streams", message: error.to_string() };
                return Err(Lost { peer: self.rank, why });
            }
            Err(_) => return Ok(()),
            Ok(()) => {}
        }
        for event in &self.events {
            if let Some(StreamState::Open(stream)) = self.peers.get_mut(event.token().0) {
                stream.ready(event);
            }
        }
        Ok(())
    }

    /// Moves bytes on all open streams; returns the first end of a stream that the caller does not know.
    fn turn(&mut self, hold: bool) -> Result<bool, Lost> {
        self.take_connections();
        let mut moved = false;
        for (peer, state) in self.peers.iter_mut().enumerate() {
            let result = match state {
                StreamState::Open(stream) => stream.turn(hold),
                StreamState::Failed(why, known) if !*known => {
                    *known = true;
                    Err(why.clone())
                }
                _ => Ok(false),
            };
            moved |= result.map_err(|why| Lost { peer, why })?;
        }
        Ok(moved)
    }

    /// Gives up streams that are not open to a rank that the store has lost.
    fn give_up_lost(&mut self) {
        if !self.peers.iter().any(|peer| matches!(peer, StreamState::Opening)) {
            return;
        }
        let Some((lost, why)) = self.hub.lost() else { return };
        for (member, peer) in self.members.iter().zip(&mut self.peers) {
            if *member == lost && matches!(peer, StreamState::Opening) {
                *peer = StreamState::Failed(why.clone(), false);
            }
        }
    }
}

/// Message for a connection of another form.
const UNLIKE: &str = "one rank encrypts it and the other does not, because only one of them finds both on one machine; \
                      set Options::encrypt to Always or Never";
/// Interval at which a rank that opens a stream asks if the store has lost the peer.
const ASK: Duration = Duration::from_millis(100);

impl Transport for SocketStreams {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    fn write(&mut self, to: Target, bytes: &[u8]) -> Result<usize, Lost> {
        let Target::Rank(peer) = to else { return Ok(bytes.len()) };
        self.open(peer);
        match &mut self.peers[peer] {
            StreamState::Open(stream) => stream.write(bytes).map_err(|why| Lost { peer, why }),
            state => state.unopened(peer),
        }
    }

    fn progress(&mut self) -> Result<bool, Lost> {
        self.poll(Duration::ZERO)?;
        self.turn(true)
    }

    fn arrived(&self, from: Source) -> &[u8] {
        let Source::Rank(peer) = from else { return &[] };
        match &self.peers[peer] {
            StreamState::Open(stream) => return stream.arrived(),
            StreamState::Idle => self.wanted[peer].set(peer != self.rank),
            _ => {}
        }
        &[]
    }

    fn consume(&mut self, from: Source, len: usize) {
        if let Source::Rank(peer) = from
            && let StreamState::Open(stream) = &mut self.peers[peer]
        {
            return stream.consume(len);
        }
        assert!(len == 0, "{len} bytes of {from:?} consumed, but none arrived");
    }

    fn read(&mut self, from: Source, into: &mut [u8]) -> Result<usize, Lost> {
        let Source::Rank(peer) = from else { return Ok(0) };
        self.open(peer);
        match &mut self.peers[peer] {
            StreamState::Open(stream) => stream.read(into).map_err(|why| Lost { peer, why }),
            state => state.unopened(peer),
        }
    }

    fn wait(&mut self, at_most: Duration) -> Result<(), Lost> {
        if self.turn(false)? {
            return Ok(());
        }
        self.give_up_lost();
        let opening = self.peers.iter().any(|peer| matches!(peer, StreamState::Opening));
        self.poll(if opening { at_most.min(ASK) } else { at_most })
    }

    fn waker(&self) -> Arc<dyn Waker> {
        Arc::<Mailbox>::clone(&self.mailbox)
    }

    fn split(&mut self, members: &[usize], channel: u64) -> Result<Box<dyn Transport>, Lost> {
        let me = members.iter().position(|member| *member == self.rank);
        let lost = |what, message: String| Lost { peer: self.rank, why: LostWhy::System { what, message } };
        let me = me.ok_or_else(|| lost("splitting", format!("rank {} is no member", self.rank)))?;
        let world = members.iter().map(|member| self.members[*member]).collect();
        let streams = SocketStreams::new(&self.hub, self.group.child(members, channel), me, world);
        Ok(Box::new(streams.map_err(|error| lost("polling streams", error.to_string()))?))
    }

    /// The store and the sockets end with the last handle: the others take a process that ends before for a lost one.
    fn drop_wait(&self) -> Duration {
        GOODBYE
    }

    fn close(&mut self) {
        self.hub.mailboxes().close(self.group);
        for peer in &mut self.peers {
            if let StreamState::Open(stream) = peer {
                stream.close(self.poll.registry());
            }
            *peer = StreamState::Closed;
        }
    }
}

impl StreamState {
    /// Result of a call for a stream that is not open.
    fn unopened(&mut self, peer: usize) -> Result<usize, Lost> {
        match self {
            StreamState::Failed(why, known) => {
                *known = true;
                Err(Lost { peer, why: why.clone() })
            }
            StreamState::Closed => Err(Lost { peer, why: LostWhy::Closed }),
            _ => Ok(0),
        }
    }
}

impl Drop for SocketStreams {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for SocketStreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SocketStreams { group, rank, members, peers, .. } = self;
        let fields = (group, rank, members, peers);
        f.debug_tuple("SocketStreams").field(&fields).finish()
    }
}
