//! Admission of connections by polling, in the thread of the service behind it: a flood of strangers takes no threads and a bounded
//! share of memory.

mod room;

use super::Why;
use super::link::why;
use super::message::Message;
use super::noise::{Alert, CallHeader, Cipher, FrameError, Frames, Psk, ReadGreeting, answer, write};
use super::{Refusal, TurnedAway};
use crate::sync::real::Mutex;
use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Registry, Token};
use room::StrangerRoom;
use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Token of the listener, and first token of a connection.
const LISTENER: Token = Token(0);
const FIRST: usize = 16;
/// Pause after the system has refused to accept a connection, for lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(20);

/// Listener with its strangers.
#[derive(Debug)]
pub(super) struct Door {
    listener: TcpListener,
    psk: Psk,
    purpose: String,
    names: Arc<Names>,
    room: StrangerRoom,
    guests: HashMap<usize, Guest>,
    next_id: usize,
    /// Guests that may be read.
    woken: VecDeque<usize>,
    /// True if connections may be waiting.
    pending: bool,
    /// Time of the next attempt, after a refusal of the system.
    retry: Option<Instant>,
}

/// Names by which callers may call a listener, its own address first.
#[derive(Debug)]
pub(super) struct Names(Mutex<Vec<String>>);

impl Names {
    pub(super) fn add(&self, name: String) {
        let mut names = self.0.lock();
        if !names.contains(&name) {
            names.push(name);
        }
    }
}

/// Connection before its confirmation.
#[derive(Debug)]
struct Guest {
    stream: TcpStream,
    from: SocketAddr,
    frames: Frames,
    greeted: Option<Greeted>,
    /// True if it is in the list of guests to be read.
    woken: bool,
}

/// State after the greeting.
#[derive(Debug)]
struct Greeted {
    hello: Vec<u8>,
    outgoing: Cipher,
}

/// Connection whose peer has proven that it knows the token and wants this listener.
#[derive(Debug)]
pub(super) struct Admitted {
    /// Its token in the registry.
    pub(super) id: usize,
    pub(super) stream: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) frames: Frames,
    pub(super) outgoing: Cipher,
    pub(super) hello: Vec<u8>,
}

/// Connections that left the door.
#[derive(Debug, Default)]
pub(super) struct Departures {
    pub(super) admitted: Vec<Admitted>,
    pub(super) turned_away: Vec<TurnedAway>,
}

impl Door {
    pub(super) fn new(
        listener: TcpListener,
        psk: Psk,
        header: CallHeader,
        handshake: Duration,
        registry: &Registry,
    ) -> std::io::Result<Self> {
        let CallHeader { purpose, endpoint } = header;
        let mut door = Door {
            listener,
            psk,
            purpose,
            names: Arc::new(Names(Mutex::new(vec![endpoint]))),
            room: StrangerRoom::new(handshake),
            guests: HashMap::new(),
            next_id: FIRST,
            woken: VecDeque::new(),
            pending: true,
            retry: None,
        };
        widen(&door.listener)?;
        registry.register(&mut door.listener, LISTENER, Interest::READABLE)?;
        Ok(door)
    }

    pub(super) fn names(&self) -> &Arc<Names> {
        &self.names
    }

    pub(super) fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Records an event of the registry for [`work`](Self::work); events of other connections have no effect.
    pub(super) fn ready(&mut self, token: Token) {
        match token {
            LISTENER => self.pending = true,
            Token(id) => {
                if let Some(guest) = self.guests.get_mut(&id)
                    && !std::mem::replace(&mut guest.woken, true)
                {
                    self.woken.push_back(id);
                }
            }
        }
    }

    /// Returns the next guest to be read; those that have left are skipped.
    fn next_woken(&mut self) -> Option<usize> {
        loop {
            let id = self.woken.pop_front()?;
            if let Some(guest) = self.guests.get_mut(&id) {
                guest.woken = false;
                return Some(id);
            }
        }
    }

    /// Reads guests and accepts connections, at most `batch` of each, and cuts those whose time is over.
    pub(super) fn work(
        &mut self,
        registry: &Registry,
        batch: usize,
        now: Instant,
        departures: &mut Departures,
    ) {
        if self.retry.is_some_and(|at| at <= now) {
            (self.retry, self.pending) = (None, true);
        }
        for _ in 0..batch {
            let Some(id) = self.next_woken() else { break };
            self.advance(id, departures);
        }
        for _ in 0..batch {
            if !self.pending || !self.accept(registry, now, departures) {
                break;
            }
        }
        for (id, after) in self.room.expire(now) {
            self.turn_away(id, Why::Silent { after }, departures);
        }
    }

    /// Returns the time until [`work`](Self::work) has something to do, if any.
    pub(super) fn patience(&self, now: Instant) -> Option<Duration> {
        if self.pending || !self.woken.is_empty() {
            return Some(Duration::ZERO);
        }
        let ends = [self.room.next_end(), self.retry];
        ends.into_iter().flatten().min().map(|end| end.saturating_duration_since(now))
    }

    /// Accepts one connection; returns false if there is none.
    fn accept(&mut self, registry: &Registry, now: Instant, departures: &mut Departures) -> bool {
        match self.listener.accept() {
            Ok((stream, from)) => {
                self.welcome(stream, from, registry, now, departures);
                return true;
            }
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {
                return true;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => self.retry = Some(now + PAUSE),
        }
        self.pending = false;
        false
    }

    fn welcome(
        &mut self,
        mut stream: TcpStream,
        from: SocketAddr,
        registry: &Registry,
        now: Instant,
        departures: &mut Departures,
    ) {
        let id = self.next_id;
        self.next_id += 1;
        let interest = Interest::READABLE | Interest::WRITABLE;
        // Without a place in the registry the connection is closed, and the peer tries again.
        let Ok(()) = registry.register(&mut stream, Token(id), interest) else { return };
        // Delays nothing but speed if the system refuses.
        let _ = stream.set_nodelay(true);
        if let Some(evicted) = self.room.arrive(id, from.ip(), now) {
            self.turn_away(evicted, Why::Silent { after: Duration::ZERO }, departures);
        }
        self.guests
            .insert(id, Guest { stream, from, frames: Frames::default(), greeted: None, woken: false });
        // A greeting that has arrived is read before the next connection could take the place.
        self.advance(id, departures);
    }

    /// Reads what a guest has sent, and takes the steps of the handshake that it completes.
    fn advance(&mut self, id: usize, departures: &mut Departures) {
        while let Some(guest) = self.guests.get_mut(&id) {
            let step = match guest.frames.next() {
                Ok(Some(message)) => self.step(id, &message, departures),
                Ok(None) => match guest.read() {
                    Ok(true) => continue,
                    Ok(false) => return,
                    Err(why) => Err(why),
                },
                Err(FrameError::TooLong { len, max }) => Err(Why::TooLong { len, max }),
                Err(FrameError::Forged) => Err(Why::Forged),
            };
            if let Err(why) = step {
                self.turn_away(id, why, departures);
            }
        }
    }

    /// Takes the step of the handshake that `message` asks for.
    fn step(&mut self, id: usize, message: &[u8], departures: &mut Departures) -> Result<(), Why> {
        let Some(mut guest) = self.guests.remove(&id) else { return Ok(()) };
        if let Some(Greeted { hello, outgoing }) = guest.greeted.take() {
            let Guest { stream, from, mut frames, .. } = guest;
            frames.trust();
            self.room.leave(id);
            departures.admitted.push(Admitted { id, stream, from, frames, outgoing, hello });
            return Ok(());
        }
        let greeted = answer(&self.psk, message).and_then(|answer| self.reply(answer, &mut guest));
        self.guests.insert(id, guest);
        self.room.greeted(id);
        greeted
    }

    /// Answers a greeting that was sealed with the token.
    fn reply(&self, mut answer: ReadGreeting, guest: &mut Guest) -> Result<(), Why> {
        let (verdict, refused) = match self.refusal(&answer.header) {
            None => (Message::Welcome, None),
            Some((refusal, why)) => (Message::Refused(refusal), Some(why)),
        };
        let hello = std::mem::take(&mut answer.hello);
        let (reply, session) = answer.reply(&verdict.encode())?;
        guest.write(&reply)?;
        guest.frames.expect_records(session.incoming);
        guest.greeted = Some(Greeted { hello, outgoing: session.outgoing });
        refused.map_or(Ok(()), Err)
    }

    /// Returns the refusal of a caller that wants another listener.
    fn refusal(&self, header: &CallHeader) -> Option<(Refusal, Why)> {
        if header.purpose != self.purpose {
            return Some((Refusal::OtherPurpose { listener: self.purpose.clone() }, Why::OtherPurpose));
        }
        let names = self.names.0.lock();
        let unknown = !names.contains(&header.endpoint);
        unknown.then(|| (Refusal::OtherEndpoint { listener: names[0].clone() }, Why::OtherEndpoint))
    }

    /// Closes a guest's connection, with an alert if it speaks this protocol.
    fn turn_away(&mut self, id: usize, why: Why, departures: &mut Departures) {
        self.room.leave(id);
        if let Some(mut guest) = self.guests.remove(&id) {
            if let Some(alert) = Alert::of(&why) {
                // The guest may be gone.
                let _ = guest.write(&alert.encode());
            }
            departures.turned_away.push(TurnedAway { from: guest.from, why });
        }
    }
}

/// Lets a burst of connections wait in the system: it drops the requests of those beyond its queue, which come again a second later.
#[cfg(unix)]
fn widen(listener: &TcpListener) -> std::io::Result<()> {
    // The system cuts the number to its own limit.
    Ok(rustix::net::listen(listener, 4096)?)
}

#[cfg(not(unix))]
fn widen(_: &TcpListener) -> std::io::Result<()> {
    Ok(())
}

impl Guest {
    /// Reads some bytes; returns false if there are none now.
    fn read(&mut self) -> Result<bool, Why> {
        let mut chunk = [0; 2048];
        match self.stream.read(&mut chunk) {
            Ok(0) => Err(Why::Closed),
            Ok(len) => {
                self.frames.feed(&chunk[..len]);
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(why(&error, Duration::ZERO)),
        }
    }

    /// Sends a message in clear. It fits the empty buffer of a new connection, or the guest is not worth waiting for.
    fn write(&mut self, message: &[u8]) -> Result<(), Why> {
        let mut bytes = Vec::new();
        write(message, None, &mut bytes);
        match self.stream.write(&bytes) {
            Ok(len) if len == bytes.len() => Ok(()),
            Ok(_) => Err(Why::Silent { after: Duration::ZERO }),
            Err(error) => Err(why(&error, Duration::ZERO)),
        }
    }
}
