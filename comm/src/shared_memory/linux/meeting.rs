//! Meeting of the ranks of a group: each has a Unix socket with a random name, and calls the ranks below its own.

use super::bell::Bell;
use super::card::Card;
use super::group::SharedMemory;
use super::layout::Layout;
use super::link::{Intro, Letter, Link, Received, receive};
use super::peer::MemoryPeer;
use super::region::Region;
use crate::p2p::transport::Transport;
use crate::shared_memory::{MeetError, RingBytes};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
    sockopt::socket_peercred,
};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Channel of the introductions between ranks that have not met.
const FIRST: u64 = u64::MAX;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 4096;
/// Pause after a listener had no room for a connection.
const PAUSE: Duration = Duration::from_millis(5);
/// Interval at which a rank asks whether the meeting is hopeless.
const ASK: Duration = Duration::from_millis(100);
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Socket of a rank that waits for the other ranks of its group.
#[derive(Debug)]
pub(crate) struct MemoryListener {
    socket: OwnedFd,
    card: Card,
    rings: RingBytes,
}

impl MemoryListener {
    /// Opens a socket with a random name. All ranks of a group need the same sizes of rings.
    pub(crate) fn open(rings: RingBytes) -> Result<Self, MeetError> {
        let card = Card::random().map_err(|error| MeetError::system("random numbers", error))?;
        let failed = |error: Errno| MeetError::system("opening a Unix socket", error);
        let socket = socket().map_err(failed)?;
        let name = SocketAddrUnix::new_abstract_name(&card.name).map_err(failed)?;
        bind(&socket, &name).and_then(|()| listen(&socket, BACKLOG)).map_err(failed)?;
        Ok(MemoryListener { socket, card, rings })
    }

    /// Returns the bytes that the other ranks need. They contain a secret: they may go to ranks of the job alone.
    pub(crate) fn card(&self) -> Vec<u8> {
        self.card.encode()
    }

    /// Meets the ranks with these `cards`, among which this listener's is number `rank`, unless that becomes `hopeless`.
    pub(crate) fn connect(
        self,
        rank: usize,
        cards: &[Vec<u8>],
        within: Duration,
        hopeless: impl Fn() -> bool,
    ) -> Result<Box<dyn Transport>, MeetError> {
        let until = Instant::now().checked_add(within);
        let mut meeting = MemoryMeeting::new(&self, rank, cards)?;
        while !meeting.advance()? {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let over = left.is_some_and(|left| left.is_zero());
            // A rank may have left because it has met all others: then its introduction is here by now.
            if over || hopeless() && !meeting.advance()? {
                return Err(MeetError::Late { ranks: meeting.missing() });
            }
            meeting.wait(left)?;
        }
        meeting.finish().map(|group| Box::new(group) as Box<dyn Transport>)
    }
}

/// Meeting in progress.
struct MemoryMeeting<'a> {
    listener: &'a OwnedFd,
    rank: usize,
    cards: Vec<Card>,
    own: Region,
    file: OwnedFd,
    bell: Arc<Bell>,
    peers: Vec<Option<MemoryPeer>>,
    /// Ranks to call.
    uncalled: Vec<usize>,
    /// Calls without an answer.
    calls: Vec<(usize, OwnedFd)>,
    /// Accepted connections without an introduction.
    guests: Vec<OwnedFd>,
}

impl<'a> MemoryMeeting<'a> {
    fn new(listener: &'a MemoryListener, rank: usize, cards: &[Vec<u8>]) -> Result<Self, MeetError> {
        let decode = |(rank, card): (usize, &Vec<u8>)| Card::decode(card).ok_or(MeetError::Card { rank });
        let cards = cards.iter().enumerate().map(decode).collect::<Result<Vec<_>, _>>()?;
        if cards.get(rank) != Some(&listener.card) {
            return Err(MeetError::NotMine { rank, world_size: cards.len() });
        }
        let rings = listener.rings;
        let layout = Layout::new(cards.len(), rings).ok_or(MeetError::Rings { rings })?;
        let (own, file) = Region::create(layout).map_err(no_memory)?;
        let bell = Bell::new().map_err(|error| MeetError::system("eventfd", error))?;
        Ok(MemoryMeeting {
            listener: &listener.socket,
            rank,
            own,
            file,
            bell: Arc::new(bell),
            peers: cards.iter().map(|_| None).collect(),
            cards,
            uncalled: (0..rank).collect(),
            calls: Vec::new(),
            guests: Vec::new(),
        })
    }

    /// Does what is possible without a wait, and returns true if all ranks have met.
    fn advance(&mut self) -> Result<bool, MeetError> {
        self.call()?;
        self.hear_answers()?;
        self.accept()?;
        self.hear_guests()?;
        Ok(self.missing().is_empty())
    }

    /// Calls the lower ranks. A full queue is tried again later.
    fn call(&mut self) -> Result<(), MeetError> {
        for rank in std::mem::take(&mut self.uncalled) {
            let failed = |error: Errno| MeetError::system("a Unix socket", error);
            let socket = socket().map_err(failed)?;
            let name = SocketAddrUnix::new_abstract_name(&self.cards[rank].name).map_err(failed)?;
            match connect(&socket, &name) {
                Err(Errno::AGAIN) => self.uncalled.push(rank),
                Err(Errno::CONNREFUSED) => return Err(MeetError::Gone { rank }),
                result => {
                    result.map_err(failed)?;
                    self.introduce(rank, socket)?;
                }
            }
        }
        Ok(())
    }

    fn introduce(&mut self, rank: usize, socket: OwnedFd) -> Result<(), MeetError> {
        if !same_user(&socket) {
            return Err(MeetError::OtherUser { rank });
        }
        let link = Link::new(socket);
        self.greet(rank, &link)?;
        self.calls.push((rank, link.into_socket()));
        Ok(())
    }

    fn greet(&self, rank: usize, link: &Link) -> Result<(), MeetError> {
        let intro = self.intro(self.rank, rank);
        match link.send(&intro, &[self.file.as_fd(), self.bell.as_fd()]) {
            Err(Errno::PIPE | Errno::CONNRESET) => Err(MeetError::Gone { rank }),
            result => result.map_err(|error| MeetError::system("sending an introduction", error)),
        }
    }

    fn hear_answers(&mut self) -> Result<(), MeetError> {
        for (rank, socket) in std::mem::take(&mut self.calls) {
            match receive(socket.as_fd())
                .map_err(|error| MeetError::system("receiving an introduction", error))?
            {
                Received::Nothing => self.calls.push((rank, socket)),
                Received::Letter(letter) if self.intro(rank, self.rank).proves(&letter) => {
                    self.meet(rank, socket, letter)?;
                }
                Received::PeerEnd => return Err(MeetError::Gone { rank }),
                Received::Letter(_) | Received::Garbage => return Err(MeetError::Differs { rank }),
            }
        }
        Ok(())
    }

    /// Accepts connections of this user's processes.
    fn accept(&mut self) -> Result<(), MeetError> {
        loop {
            match accept_with(self.listener, FLAGS) {
                Ok(guest) if same_user(&guest) => self.guests.push(guest),
                Ok(_) | Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(MeetError::system("accepting a connection", error)),
            }
        }
    }

    /// Takes introductions of ranks above this one. Connections that prove nothing are closed.
    fn hear_guests(&mut self) -> Result<(), MeetError> {
        for guest in std::mem::take(&mut self.guests) {
            match receive(guest.as_fd()) {
                Ok(Received::Nothing) => self.guests.push(guest),
                Ok(Received::Letter(letter)) => self.answer(guest, letter)?,
                Ok(Received::PeerEnd | Received::Garbage) | Err(_) => {}
            }
        }
        Ok(())
    }

    fn answer(&mut self, guest: OwnedFd, letter: Letter) -> Result<(), MeetError> {
        let rank = letter.from();
        let above = rank > self.rank && rank < self.cards.len();
        if !above || self.peers[rank].is_some() || !self.intro(rank, self.rank).proves(&letter) {
            return Ok(());
        }
        let link = Link::new(guest);
        self.greet(rank, &link)?;
        self.meet(rank, link.into_socket(), letter)
    }

    /// Maps the memory of a rank that has proved itself.
    fn meet(&mut self, rank: usize, socket: OwnedFd, letter: Letter) -> Result<(), MeetError> {
        if !self.intro(rank, self.rank).equals(&letter) {
            return Err(MeetError::Differs { rank });
        }
        let mut files = letter.files.into_iter();
        let (Some(file), Some(event)) = (files.next(), files.next()) else {
            return Err(MeetError::Differs { rank });
        };
        let region = Region::attach(file.as_fd(), *self.own.layout(), self.rank)
            .map_err(|why| MeetError::Region { rank, why })?;
        let mut peer = MemoryPeer::new(rank, self.rank, self.own.layout(), Some(Arc::new(Link::new(socket))));
        peer.attach(region, Bell::received(event));
        self.peers[rank] = Some(peer);
        Ok(())
    }

    fn intro(&self, from: usize, to: usize) -> Intro {
        let proof = Card::proof(&self.cards[from], &self.cards[to]);
        Intro { channel: FIRST, from, to, layout: *self.own.layout(), proof }
    }

    fn missing(&self) -> Vec<usize> {
        (0..self.cards.len()).filter(|&rank| rank != self.rank && self.peers[rank].is_none()).collect()
    }

    /// Waits until a socket has something.
    fn wait(&self, left: Option<Duration>) -> Result<(), MeetError> {
        let sockets = self.calls.iter().map(|(_, socket)| socket).chain(&self.guests).chain([self.listener]);
        let mut sockets: Vec<_> = sockets.map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        let pause = if self.uncalled.is_empty() { ASK } else { PAUSE };
        let limit = Timespec::try_from(left.unwrap_or(pause).min(pause))
            .map_err(|error| MeetError::system("a time limit", error))?;
        match poll(&mut sockets, Some(&limit)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(MeetError::system("poll", error)),
        }
    }

    fn finish(self) -> Result<SharedMemory, MeetError> {
        SharedMemory::new(self.rank, self.own, self.peers, self.bell)
            .map_err(|error| MeetError::system("epoll", error))
    }
}

/// Opens a socket that keeps the borders of messages and does not block.
fn socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}

/// Returns true if the process at the other end has this process's user.
fn same_user(socket: &OwnedFd) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// Error of the creation of a region. Systems before Linux 5.1 do not know the seal against further writers.
fn no_memory(error: Errno) -> MeetError {
    match error {
        Errno::INVAL | Errno::NOSYS => MeetError::Unsupported,
        error => MeetError::system("creating shared memory", error),
    }
}
