//! Authenticated and encrypted connection between two processes that know the job's token, for services beside the store.

use super::connect::{CallFailed, allowed, dial_within, introduce, permanent, psk, refused};
use super::door::{Admitted, Departures, Door, Names};
use super::link::{self, Receiver, Sender, after};
use super::noise::{CallHeader, Cipher, MAX_MESSAGE, Psk};
use super::{Error, Refusal, Token, TurnedAway, Why};
use crate::sync::real::Mutex;
use mio::net::TcpListener;
use mio::{Events, Poll};
use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest purpose in bytes, so that a greeting is a short frame.
const MAX_PURPOSE: usize = 256;
/// Beginning of the purposes of services, which are no store.
const SERVICE: &str = "service/";
/// Random bytes of a listener's own name.
const NAME: usize = 16;
/// Pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(20);
/// Connections that are accepted, and guests that are read, in one turn.
const BATCH: usize = 64;
/// Rejected connections that a listener remembers.
const REMEMBERED: usize = 64;

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
    /// Longest payload, in bytes; long ones travel in several records.
    pub const MAX: usize = MAX_MESSAGE;

    /// Sends `payload`; returns once the system has taken it.
    ///
    /// # Errors
    /// [`Why::TooLong`] above [`MAX`](Self::MAX); else the reason for the connection's end.
    pub fn send(&mut self, payload: &[u8]) -> Result<(), Why> {
        if payload.len() > Self::MAX {
            return Err(Why::TooLong { len: payload.len(), max: Self::MAX });
        }
        self.0.payload(payload)
    }

    /// Ends the connection, for both sides and both directions.
    pub fn cut(&self) {
        self.0.cut();
    }

    /// Socket of the connection, for its options and addresses: its bytes are this connection's records.
    pub fn socket(&self) -> &TcpStream {
        self.0.socket()
    }
}

/// Authenticated connection as its parts, for a protocol with frames of its own: plain ones, or sealed by the ciphers.
#[derive(Debug)]
pub struct RawConnection {
    /// The socket, in blocking mode with the timeouts of the connection.
    pub socket: Arc<TcpStream>,
    /// Bytes that have arrived and belong to the first frames.
    pub received: Vec<u8>,
    /// Opens the peer's records.
    pub incoming: Cipher,
    /// Seals records for the peer.
    pub outgoing: Cipher,
}

impl RawConnection {
    /// Takes a connection apart; both sides do it after the same payload. `None` if the halves are of no connection that is
    /// authenticated.
    pub fn new(Incoming(incoming): Incoming, Outgoing(outgoing): Outgoing) -> Option<Self> {
        let (socket, received, incoming, outgoing) = link::into_raw(incoming, outgoing)?;
        Some(RawConnection { socket, received, incoming, outgoing })
    }
}

/// Connection that a [`Listener`] has admitted.
#[derive(Debug)]
pub struct Accepted {
    /// Receiving half.
    pub incoming: Incoming,
    /// Sending half.
    pub outgoing: Outgoing,
    /// Address of the caller.
    pub from: SocketAddr,
}

/// Listener of a service. It has no thread: [`accept`](Listener::accept) polls all connections that are not admitted yet.
///
/// ```
/// use meshstep_comm::rendezvous::{Accepted, Cipher, Forged, Incoming, Listener, Outgoing, RawConnection, Token, Why, call};
/// use std::time::{Duration, Instant};
///
/// let token = Token::from_hex(&"0f1e2d3c4b5a69788796a5b4c3d2e1f0".repeat(2))?;
/// let minute = Duration::from_secs(60);
/// let listener = Listener::bind("127.0.0.1:0".parse()?, Some(&token), "my service", minute)?;
/// let addr = listener.addr();
/// let (accepted, called) = std::thread::scope(|scope| {
///     let caller = scope.spawn(|| call(addr, Some(&token), "my service", minute));
///     (listener.accept(Instant::now() + minute, minute), caller.join())
/// });
/// let Accepted { mut incoming, outgoing, .. } = accepted.ok_or("nobody has called")?;
/// let (answers, mut calls): (Incoming, Outgoing) = called.map_err(|_| "the caller panicked")??;
/// calls.send(b"hello")?;
/// assert_eq!(incoming.next(Instant::now() + minute)?, b"hello");
/// let too_long = calls.send(&vec![0; Outgoing::MAX + 1]);
/// assert!(matches!(too_long, Err(Why::TooLong { .. })));
/// assert!(listener.turned_away().is_empty());
///
/// // Both sides can go on with frames of their own.
/// let mut caller = RawConnection::new(answers, calls).ok_or("authenticated")?;
/// let mut service = RawConnection::new(incoming, outgoing).ok_or("authenticated")?;
/// let seal: &mut Cipher = &mut caller.outgoing;
/// let mut record = Vec::new();
/// seal.seal(b"a frame", &mut record);
/// assert_eq!(service.incoming.open(&record)?, b"a frame");
/// record[0] ^= 1;
/// assert_eq!(service.incoming.open(&record), Err(Forged));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Listener {
    addr: SocketAddr,
    name: String,
    names: Arc<Names>,
    turned_away: Mutex<VecDeque<TurnedAway>>,
    polled: Mutex<Polled>,
}

#[derive(Debug)]
struct Polled {
    poll: Poll,
    events: Events,
    door: Door,
    departures: Departures,
    admitted: VecDeque<Admitted>,
}

impl Listener {
    /// Listens on `addr` (port 0 picks a free one) for calls with the same `purpose` and token; a caller has `handshake` to prove
    /// that it knows the token, and must send its first message within 250 ms.
    ///
    /// # Errors
    /// [`Error::TokenNeeded`] without a token if other machines can reach `addr`; [`Error::PortTaken`], [`Error::NotLocal`];
    /// [`Error::NoAddress`] for an address of all interfaces; [`Error::TooLarge`] for a purpose above 256 bytes.
    pub fn bind(
        addr: SocketAddr,
        token: Option<&Token>,
        purpose: &str,
        handshake: Duration,
    ) -> Result<Self, Error> {
        let purpose = service(purpose)?;
        allowed(&addr.ip().to_string(), token, addr)?;
        let listener = TcpListener::bind(addr).map_err(|error| refused(addr, &error))?;
        let system = |error: std::io::Error| Error::System { what: "listening", message: error.to_string() };
        let (addr, poll) = (listener.local_addr().map_err(system)?, Poll::new().map_err(system)?);
        let header = CallHeader { purpose, endpoint: addr.to_string() };
        let door = Door::new(listener, psk(token)?, header, handshake, poll.registry());
        let (door, name) = (door.map_err(system)?, random_name()?);
        let names = Arc::clone(door.names());
        names.add(name.clone());
        let (departures, events) = (Departures::default(), Events::with_capacity(256));
        let polled = Mutex::new(Polled { poll, events, door, departures, admitted: VecDeque::new() });
        Ok(Listener { addr, name, names, turned_away: Mutex::default(), polled })
    }

    /// Address of the listener, and the name by which [`call`] calls it.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Random name of this listener, to be published with an address of it: a [`connect`] by this name reaches no other listener,
    /// even where two machines have the same address.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Accepts callers that call this listener by another name: its address behind a forwarded port.
    ///
    /// # Errors
    /// [`Error::TooLarge`] above 256 bytes.
    pub fn add_name(&self, name: &str) -> Result<(), Error> {
        limit("name", name)?;
        self.names.add(name.to_owned());
        Ok(())
    }

    /// Returns the next connection whose caller knows the token, and wants this purpose and this listener; `None` if there was none
    /// until `until`. Writes to it may take `patience`. One thread at a time accepts; another one waits for it.
    pub fn accept(&self, until: Instant, patience: Duration) -> Option<Accepted> {
        let mut polled = self.polled.lock();
        loop {
            while let Some(admitted) = polled.admitted.pop_front() {
                if let Ok(accepted) = establish(admitted, patience) {
                    return Some(accepted);
                }
            }
            let goes_on = polled.turn(until);
            self.remember(polled.departures.turned_away.drain(..));
            if !goes_on {
                return None;
            }
        }
    }

    /// Returns the connections that were rejected since the last call, the last 64 of them.
    pub fn turned_away(&self) -> Vec<TurnedAway> {
        self.turned_away.lock().drain(..).collect()
    }

    fn remember(&self, rejected: impl Iterator<Item = TurnedAway>) {
        let mut turned_away = self.turned_away.lock();
        turned_away.extend(rejected);
        let surplus = turned_away.len().saturating_sub(REMEMBERED);
        turned_away.drain(..surplus);
    }
}

impl Polled {
    /// Waits for events and handles them; returns false if the time is over and nobody was admitted.
    fn turn(&mut self, until: Instant) -> bool {
        let now = Instant::now();
        let left = until.saturating_duration_since(now);
        let patience = self.door.patience(now).map_or(left, |patience| patience.min(left));
        // A failure to poll is a turn without events.
        if self.poll.poll(&mut self.events, Some(patience)).is_ok() {
            for event in &self.events {
                self.door.ready(event.token());
            }
        }
        let now = Instant::now();
        self.door.work(self.poll.registry(), BATCH, now, &mut self.departures);
        for mut admitted in self.departures.admitted.drain(..) {
            // Its later events are of no interest here. A socket that stays registered would only wake this poll.
            let _ = self.poll.registry().deregister(&mut admitted.stream);
            self.admitted.push_back(admitted);
        }
        now < until || !self.admitted.is_empty()
    }
}

/// Makes a blocking connection of an admitted one.
fn establish(admitted: Admitted, patience: Duration) -> Result<Accepted, Why> {
    let Admitted { stream, from, frames, outgoing, .. } = admitted;
    let stream = Arc::new(TcpStream::from(stream));
    let (receiver, sender) = link::admitted_ends(&stream, frames, outgoing, patience)?;
    Ok(Accepted { incoming: Incoming(receiver), outgoing: Outgoing(sender), from })
}

/// Calls the [`Listener`] at `addr` once, by its address; later writes may also take `within`.
///
/// # Errors
/// [`Error::Unreachable`] if there is no answer in that time, which may change; [`Error::WrongToken`], [`Error::OtherRun`] for
/// another purpose, [`Error::OtherEndpoint`] for a listener of another name, [`Error::OtherVersion`], [`Error::NotAStore`] and
/// [`Error::TokenNeeded`], which do not.
pub fn call(
    addr: SocketAddr,
    token: Option<&Token>,
    purpose: &str,
    within: Duration,
) -> Result<(Incoming, Outgoing), Error> {
    Call::new(addr, token, purpose, &addr.to_string())?.once(after(within), within)
}

/// Calls the [`Listener`] `name` at `addr` until it answers; later writes may also take `within`.
///
/// # Errors
/// As for [`call`]; [`Error::Unreachable`] at the end of `within`.
pub fn connect(
    addr: SocketAddr,
    token: Option<&Token>,
    purpose: &str,
    name: &str,
    within: Duration,
) -> Result<(Incoming, Outgoing), Error> {
    let (call, until) = (Call::new(addr, token, purpose, name)?, after(within));
    loop {
        match call.once(until, within) {
            Err(Error::Unreachable { .. }) if Instant::now() + PAUSE < until => std::thread::sleep(PAUSE),
            result => return result,
        }
    }
}

/// Arguments of a call.
struct Call {
    addr: SocketAddr,
    psk: Psk,
    header: CallHeader,
}

impl Call {
    fn new(addr: SocketAddr, token: Option<&Token>, purpose: &str, name: &str) -> Result<Self, Error> {
        let purpose = service(purpose)?;
        limit("name", name)?;
        allowed(&addr.ip().to_string(), token, addr)?;
        Ok(Call { addr, psk: psk(token)?, header: CallHeader { purpose, endpoint: name.to_owned() } })
    }

    fn once(&self, until: Instant, patience: Duration) -> Result<(Incoming, Outgoing), Error> {
        let (receiver, sender) =
            self.converse(until, patience).map_err(|failed| self.explain(patience, failed))?;
        Ok((Incoming(receiver), Outgoing(sender)))
    }

    fn converse(&self, until: Instant, patience: Duration) -> Result<(Receiver, Sender), CallFailed> {
        let system = |error: std::io::Error| Why::System { message: error.to_string() };
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = dial_within(self.addr, left).map_err(system)?;
        if stream.local_addr().is_ok_and(|local| local == self.addr) {
            // Without a listener, the system may give the socket the very port that it calls.
            return Err(Why::Closed.into());
        }
        introduce(&Arc::new(stream), &self.psk, &self.header, &[], until, patience)
    }

    fn explain(&self, after: Duration, failed: CallFailed) -> Error {
        let addr = self.addr;
        let why = match failed {
            CallFailed::Refused(Refusal::OtherPurpose { listener }) => match listener.strip_prefix(SERVICE) {
                Some(store) => {
                    let run_id = self.header.purpose[SERVICE.len()..].to_owned();
                    return Error::OtherRun { addr, run_id, store: store.to_owned() };
                }
                None => Why::OtherPurpose,
            },
            CallFailed::Refused(Refusal::OtherEndpoint { listener }) => {
                return Error::OtherEndpoint { addr, endpoint: self.header.endpoint.clone(), listener };
            }
            CallFailed::Refused(_) => Why::NotUnderstood,
            CallFailed::Why(why) => why,
        };
        let (host, port) = (addr.ip().to_string(), addr.port());
        permanent(&why, addr).unwrap_or_else(|| Error::Unreachable {
            host,
            port,
            after,
            last: why.to_string(),
        })
    }
}

/// Returns the purpose of a service's listener.
fn service(purpose: &str) -> Result<String, Error> {
    limit("purpose", purpose)?;
    Ok(format!("{SERVICE}{purpose}"))
}

fn limit(what: &'static str, text: &str) -> Result<(), Error> {
    let (len, max) = (text.len(), MAX_PURPOSE);
    if len > max { Err(Error::TooLarge { what, len, max }) } else { Ok(()) }
}

fn random_name() -> Result<String, Error> {
    let mut bytes = [0; NAME];
    let filled = getrandom::fill(&mut bytes);
    filled.map_err(|error| Error::System { what: "random bytes", message: error.to_string() })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
