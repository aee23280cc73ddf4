//! Authenticated connection between two processes that know the job's token, for services beside the store.
//!
//! ```text
//! caller                                    listener
//!   call: nonce, purpose                      -->
//!                               <--  challenge: nonce, the listener's proof
//!   answer: the caller's proof                -->
//!                               <--  welcome, or refused for another purpose; sealed as all that follows
//! ```

use super::admission::{challenge, introduce, nonce};
use super::connect::{allowed, key, refused};
use super::link::{self, Receiver, Sender, after};
use super::message::Message;
use super::proof::Key;
use super::{Error, Refusal, Token, Why, frame};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest purpose in bytes, so that a call is a short frame.
const MAX_PURPOSE: usize = 256;

/// Receiving half of a connection.
#[derive(Debug)]
pub struct Incoming(Receiver);

/// Sending half of a connection.
#[derive(Debug)]
pub struct Outgoing(Sender);

impl Incoming {
    /// Returns the next payload given to [`Outgoing::send`].
    ///
    /// # Errors
    /// [`Why::Silent`] if the payload does not arrive completely before `until`; the caller may then keep waiting. After any
    /// other error the connection is unusable.
    pub fn next(&mut self, until: Instant) -> Result<Vec<u8>, Why> {
        self.0.payload(until)
    }
}

impl Outgoing {
    /// Longest payload, in bytes.
    pub const MAX: usize = frame::MAX_PAYLOAD;

    /// Sends `payload`; returns once the system has taken it.
    ///
    /// # Errors
    /// [`Why::TooLong`] above [`MAX`](Self::MAX); else the reason for the connection's end.
    pub fn send(&mut self, payload: &[u8]) -> Result<(), Why> {
        if payload.len() > Self::MAX {
            return Err(Why::TooLong { len: payload.len(), max: Self::MAX });
        }
        self.0.payloads(&[payload.into()])
    }

    /// Ends the connection, for both sides and both directions.
    pub fn cut(&self) {
        self.0.cut();
    }
}

/// Listener of a service.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    addr: SocketAddr,
    key: Key,
    purpose: String,
}

impl Listener {
    /// Listens on `addr` (port 0 picks a free one) for calls with the same `purpose` and token.
    ///
    /// # Errors
    /// [`Error::TokenNeeded`] without a token if other machines can reach `addr`; [`Error::PortTaken`], [`Error::NotLocal`];
    /// [`Error::NoAddress`] for an address of all interfaces; [`Error::TooLarge`] for a purpose above 256 bytes.
    pub fn bind(addr: SocketAddr, token: Option<&Token>, purpose: &str) -> Result<Self, Error> {
        check(purpose)?;
        allowed(&addr.ip().to_string(), token, addr)?;
        let listener = TcpListener::bind(addr).map_err(|error| refused(addr, &error))?;
        let system = |error: std::io::Error| Error::System { what: "listening", message: error.to_string() };
        listener.set_nonblocking(true).map_err(system)?;
        let addr = listener.local_addr().map_err(system)?;
        Ok(Listener { listener, addr, key: key(token), purpose: purpose.to_owned() })
    }

    /// Address of the listener.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns a pending connection, not yet authenticated, or `None`. Does not wait.
    pub fn accept(&self) -> Option<TcpStream> {
        // A connection that closed again and a system out of sockets count as no connection.
        self.listener.accept().ok().map(|(stream, _)| stream)
    }

    /// Authenticates `stream` within `handshake` and checks its purpose; later writes may take `patience`.
    ///
    /// # Errors
    /// The fault of the peer; the connection is closed.
    pub fn admit(
        &self,
        stream: TcpStream,
        handshake: Duration,
        patience: Duration,
    ) -> Result<(Incoming, Outgoing), Why> {
        let until = after(handshake);
        let (mut receiver, mut sender) = link::ends(&Arc::new(stream), handshake)?;
        let (Message::Call { purpose, .. }, call) = receiver.message(until)? else {
            return Err(Why::NotUnderstood);
        };
        challenge(&self.key, &call, until, &mut receiver, &mut sender)?;
        if purpose != self.purpose {
            sender.message(&Message::Refused(Refusal::OtherRun { store: self.purpose.clone() }))?;
            return Err(Why::NotUnderstood);
        }
        sender.message(&Message::Welcome)?;
        sender.set_patience(patience)?;
        Ok((Incoming(receiver), Outgoing(sender)))
    }
}

/// Calls the [`Listener`] at `addr` once; later writes may also take `within`.
///
/// # Errors
/// [`Error::Unreachable`] if there is no answer in that time, which may change; [`Error::WrongToken`], [`Error::OtherRun`] for
/// another purpose, [`Error::NotAStore`] and [`Error::TokenNeeded`], which do not.
pub fn call(
    addr: SocketAddr,
    token: Option<&Token>,
    purpose: &str,
    within: Duration,
) -> Result<(Incoming, Outgoing), Error> {
    check(purpose)?;
    allowed(&addr.ip().to_string(), token, addr)?;
    converse(addr, token, purpose, within).map_err(|why| explain(addr, purpose, within, why))
}

/// Failure of a call.
enum ChannelFailed {
    Why(Why),
    Other { purpose: String },
}

impl From<Why> for ChannelFailed {
    fn from(why: Why) -> Self {
        ChannelFailed::Why(why)
    }
}

fn converse(
    addr: SocketAddr,
    token: Option<&Token>,
    purpose: &str,
    within: Duration,
) -> Result<(Incoming, Outgoing), ChannelFailed> {
    let until = after(within);
    let system = |error: std::io::Error| Why::System { message: error.to_string() };
    let stream = TcpStream::connect_timeout(&addr, within.max(Duration::from_millis(1))).map_err(system)?;
    if stream.local_addr().is_ok_and(|local| local == addr) {
        // Without a listener, the system may give the socket the very port that it calls.
        return Err(Why::Closed.into());
    }
    let (mut receiver, mut sender) = link::ends(&Arc::new(stream), within)?;
    let call = Message::Call { nonce: nonce()?, purpose: purpose.to_owned() };
    introduce(&key(token), &call, until, &mut receiver, &mut sender)?;
    match receiver.message(until)?.0 {
        Message::Welcome => Ok((Incoming(receiver), Outgoing(sender))),
        Message::Refused(Refusal::OtherRun { store: purpose }) => Err(ChannelFailed::Other { purpose }),
        _ => Err(Why::NotUnderstood.into()),
    }
}

fn explain(addr: SocketAddr, purpose: &str, after: Duration, failed: ChannelFailed) -> Error {
    match failed {
        ChannelFailed::Other { purpose: store } => {
            Error::OtherRun { addr, run_id: purpose.to_owned(), store }
        }
        ChannelFailed::Why(Why::WrongToken) => Error::WrongToken { addr },
        ChannelFailed::Why(why @ (Why::TooLong { .. } | Why::Forged | Why::NotUnderstood)) => {
            Error::NotAStore { addr, why }
        }
        ChannelFailed::Why(why) => {
            let (host, port) = (addr.ip().to_string(), addr.port());
            Error::Unreachable { host, port, after, last: why.to_string() }
        }
    }
}

fn check(purpose: &str) -> Result<(), Error> {
    let (len, max) = (purpose.len(), MAX_PURPOSE);
    if len > max { Err(Error::TooLarge { what: "purpose", len, max }) } else { Ok(()) }
}
