//! Stream to one peer: its socket, what the system last said of it, and both halves.

use super::inbox::{Received, RecordInbox};
use super::outbox::Outbox;
use crate::p2p::transport::LostWhy;
use crate::rendezvous::RawConnection;
use mio::event::Event;
use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use std::cell::Cell;
use std::io::{self, Read};
use std::sync::Arc;

/// Receives of a close, of bytes that nobody reads.
const DRAIN: usize = 1024;

/// Open stream to one peer.
#[derive(Debug)]
pub(super) struct RankStream {
    socket: TcpStream,
    inbox: RecordInbox,
    outbox: Outbox,
    /// True if the socket may have bytes; the system tells of new ones only.
    readable: bool,
    writable: bool,
    /// True if not all bytes of the last write fitted, and the caller does not know of room since.
    short: bool,
    /// True if the caller looked for bytes and found none.
    missed: Cell<bool>,
    /// Reason for which nothing more can be sent.
    unsendable: Option<LostWhy>,
    /// True once the caller has the reason for the stream's end.
    reported: bool,
    closed: bool,
}

impl RankStream {
    /// Makes a stream of a connection, with sealed records or plain ones.
    pub(super) fn new(
        connection: RawConnection,
        sealed: bool,
        registry: &Registry,
        token: Token,
    ) -> io::Result<Self> {
        let RawConnection { socket, received, incoming, outgoing } = connection;
        let socket = Arc::try_unwrap(socket).or_else(|socket| socket.try_clone())?;
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        keep_alive(&socket)?;
        let mut socket = TcpStream::from_std(socket);
        registry.register(&mut socket, token, Interest::READABLE | Interest::WRITABLE)?;
        let (inbox, outbox) = match sealed {
            true => (RecordInbox::new(Some(incoming), &received), Outbox::new(Some(outgoing))),
            false => (RecordInbox::new(None, &received), Outbox::new(None)),
        };
        Ok(RankStream {
            socket,
            inbox,
            outbox,
            readable: true,
            writable: true,
            short: false,
            missed: Cell::new(false),
            unsendable: None,
            reported: false,
            closed: false,
        })
    }

    /// Notes what the system says of the socket.
    pub(super) fn ready(&mut self, event: &Event) {
        self.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
        self.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
    }

    pub(super) fn arrived(&self) -> &[u8] {
        let arrived = self.inbox.arrived();
        self.missed.set(arrived.is_empty());
        arrived
    }

    pub(super) fn consume(&mut self, len: usize) {
        self.inbox.consume(len);
    }

    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<usize, LostWhy> {
        let len = self.inbox.read(&mut self.socket, into, available)?;
        let missed = len == 0 && !into.is_empty();
        self.missed.set(missed);
        match self.end() {
            Some(why) if missed => Err(self.report(why)),
            _ => Ok(len),
        }
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<usize, LostWhy> {
        if bytes.is_empty() {
            return Ok(0);
        }
        if self.closed || self.inbox.is_done() {
            return Err(self.report(LostWhy::Closed));
        }
        let written =
            self.send(|outbox, socket| outbox.write(socket, bytes).map(|len| (len, len == bytes.len())));
        self.short = written.as_ref().is_ok_and(|len| *len < bytes.len());
        written
    }

    /// Receives and sends what is possible now; returns true if anything moved. With `hold`, payloads that the caller will read into
    /// memory of its own stay in the system. The reason for the stream's end comes once.
    pub(super) fn turn(&mut self, hold: bool) -> Result<bool, LostWhy> {
        let sent = match self.outbox.keeps() && self.writable && self.unsendable.is_none() {
            true => self.send(|outbox, socket| outbox.flush(socket).map(|all| (usize::from(all), all))),
            false => Ok(0),
        };
        // Room is told once: an open record goes on from the caller's memory, and the system tells of room only once, too.
        let room = self.writable && std::mem::take(&mut self.short);
        let received = self.receive(hold);
        match self.end().filter(|_| !self.reported) {
            Some(why) => Err(self.report(why)),
            None => Ok((sent? > 0) | received | room),
        }
    }

    /// Says goodbye and ends both directions; what the system has taken still arrives.
    pub(super) fn close(&mut self, registry: &Registry) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        // Without a goodbye the peer takes the end of the stream for the end of this process.
        let _ = self.outbox.goodbye(&mut self.socket);
        // Unread bytes would make the system reset the connection, and drop bytes that are on their way to the peer.
        let mut unread = [0; 4096];
        for _ in 0..DRAIN {
            if !self.socket.read(&mut unread).is_ok_and(|len| len > 0) {
                break;
            }
        }
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
        let _ = registry.deregister(&mut self.socket);
    }

    /// Calls the system for the sending half; returns what it has moved.
    fn send(
        &mut self,
        call: impl FnOnce(&mut Outbox, &mut TcpStream) -> Result<(usize, bool), LostWhy>,
    ) -> Result<usize, LostWhy> {
        if let Some(why) = self.unsendable.clone() {
            return Err(self.report(why));
        }
        if !self.writable {
            return Ok(0);
        }
        match call(&mut self.outbox, &mut self.socket) {
            Ok((moved, all)) => {
                self.writable = all;
                Ok(moved)
            }
            Err(why) => {
                self.unsendable = Some(why.clone());
                Err(self.report(why))
            }
        }
    }

    /// Reason for the end of the stream: it failed, or the peer said goodbye and the caller misses further bytes.
    fn end(&self) -> Option<LostWhy> {
        let done = self.inbox.is_done() && self.missed.get();
        self.inbox.failed().cloned().or_else(|| done.then_some(LostWhy::Closed))
    }

    fn report(&mut self, why: LostWhy) -> LostWhy {
        self.reported = true;
        why
    }

    /// Receives until a record is there, unless one is in use.
    fn receive(&mut self, hold: bool) -> bool {
        let mut moved = false;
        while self.readable && self.inbox.arrived().is_empty() {
            if let Some(missing) = self.inbox.waits().filter(|_| hold) {
                let complete = available(&self.socket) >= missing;
                if complete {
                    self.inbox.announce();
                }
                return moved | complete;
            }
            match self.inbox.receive(&mut self.socket) {
                Ok(Received::Moved) => moved = true,
                Ok(Received::Nothing) => self.readable = false,
                Ok(Received::Full) | Err(_) => break,
            }
        }
        moved
    }
}

/// Number of bytes that a receive would return now.
fn available(socket: &TcpStream) -> usize {
    rustix::io::ioctl_fionread(socket).map_or(0, |len| len as usize)
}

/// Asks the system to notice machines that are gone while no bytes are on the way.
fn keep_alive(socket: &std::net::TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(socket, true)?;
    #[cfg(target_os = "linux")]
    {
        use std::time::Duration;
        sockopt::set_tcp_keepidle(socket, Duration::from_secs(10))?;
        sockopt::set_tcp_keepintvl(socket, Duration::from_secs(5))?;
        sockopt::set_tcp_keepcnt(socket, 4)?;
    }
    Ok(())
}
