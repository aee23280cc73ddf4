//! A connection of its own between two processes that know the job's token: for a service beside the store.
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

/// The longest purpose, in bytes, so that a call is a short frame.
const MAX_PURPOSE: usize = 256;

/// What arrives from the other side.
#[derive(Debug)]
pub struct Incoming(Receiver);

/// What goes to the other side.
#[derive(Debug)]
pub struct Outgoing(Sender);

impl Incoming {
    /// The next payload, as it was given to [`Outgoing::send`].
    ///
    /// # Errors
    /// [`Why::Silent`] if not all of it comes before `until`, after which one may go on waiting. After any other the
    /// connection is of no more use.
    pub fn next(&mut self, until: Instant) -> Result<Vec<u8>, Why> {
        self.0.payload(until)
    }
}

impl Outgoing {
    /// The longest payload, in bytes.
    pub const MAX: usize = frame::MAX_PAYLOAD;

    /// Gives `payload` to the system, which has taken it when this returns.
    ///
    /// # Errors
    /// [`Why::TooLong`] above [`MAX`](Self::MAX); else how the connection ended.
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

/// Where a service is called.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    addr: SocketAddr,
    key: Key,
    purpose: String,
}

impl Listener {
    /// Listens on `addr`, port 0 being any that is free, for calls with the same `purpose` and token.
    ///
    /// # Errors
    /// [`Error::TokenNeeded`] without a token where other machines reach `addr`; [`Error::PortTaken`], [`Error::NotLocal`],
    /// [`Error::NoAddress`] for one that stands for every interface; [`Error::TooLarge`] for a purpose above 256 bytes.
    pub fn bind(addr: SocketAddr, token: Option<&Token>, purpose: &str) -> Result<Self, Error> {
        check(purpose)?;
        allowed(&addr.ip().to_string(), token, addr)?;
        let listener = TcpListener::bind(addr).map_err(|error| refused(addr, &error))?;
        let system = |error: std::io::Error| Error::System { what: "listening", message: error.to_string() };
        listener.set_nonblocking(true).map_err(system)?;
        let addr = listener.local_addr().map_err(system)?;
        Ok(Listener { listener, addr, key: key(token), purpose: purpose.to_owned() })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Somebody who has connected and proven nothing yet; `None` when nobody has. Does not wait.
    pub fn accept(&self) -> Option<TcpStream> {
        // Whoever was there for a moment only, and a system out of sockets, are nobody as well.
        self.listener.accept().ok().map(|(stream, _)| stream)
    }

    /// Lets `stream` prove within `handshake` that it knows the token and wants this; a write may take `patience` later.
    ///
    /// # Errors
    /// What is wrong with who is there, after which the connection is closed.
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

/// Calls the [`Listener`] at `addr`, once; a later write may take `within` as well.
///
/// # Errors
/// [`Error::Unreachable`] where nobody answers in that time, which may change; [`Error::WrongToken`], [`Error::OtherRun`] for
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

/// How a call failed.
enum Failed {
    Why(Why),
    Other { purpose: String },
}

impl From<Why> for Failed {
    fn from(why: Why) -> Self {
        Failed::Why(why)
    }
}

fn converse(
    addr: SocketAddr,
    token: Option<&Token>,
    purpose: &str,
    within: Duration,
) -> Result<(Incoming, Outgoing), Failed> {
    let until = after(within);
    let system = |error: std::io::Error| Why::System { message: error.to_string() };
    let stream = TcpStream::connect_timeout(&addr, within.max(Duration::from_millis(1))).map_err(system)?;
    if stream.local_addr().is_ok_and(|local| local == addr) {
        // Where nobody listens, the system may give the socket the very port it calls.
        return Err(Why::Closed.into());
    }
    let (mut receiver, mut sender) = link::ends(&Arc::new(stream), within)?;
    let call = Message::Call { nonce: nonce()?, purpose: purpose.to_owned() };
    introduce(&key(token), &call, until, &mut receiver, &mut sender)?;
    match receiver.message(until)?.0 {
        Message::Welcome => Ok((Incoming(receiver), Outgoing(sender))),
        Message::Refused(Refusal::OtherRun { store: purpose }) => Err(Failed::Other { purpose }),
        _ => Err(Why::NotUnderstood.into()),
    }
}

fn explain(addr: SocketAddr, purpose: &str, after: Duration, failed: Failed) -> Error {
    match failed {
        Failed::Other { purpose: store } => Error::OtherRun { addr, run_id: purpose.to_owned(), store },
        Failed::Why(Why::WrongToken) => Error::WrongToken { addr },
        Failed::Why(why @ (Why::TooLong { .. } | Why::Forged | Why::NotUnderstood)) => {
            Error::NotAStore { addr, why }
        }
        Failed::Why(why) => {
            let (host, port) = (addr.ip().to_string(), addr.port());
            Error::Unreachable { host, port, after, last: why.to_string() }
        }
    }
}

fn check(purpose: &str) -> Result<(), Error> {
    let (len, max) = (purpose.len(), MAX_PURPOSE);
    if len > max { Err(Error::TooLarge { what: "purpose", len, max }) } else { Ok(()) }
}
