//! Connection to the store: rank 0 listens, and every rank retries until it is admitted or refused for good.

use super::link::{self, Receiver, Sender};
use super::message::{Claim, Message};
use super::noise::{CallHeader, MAX_NAME, Psk, VERSION, greet};
use super::{Environment, Error, Options, Refusal, Token, Why, server};
use mio::net::TcpListener;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause between attempts, and the limit for the system to answer one.
const PAUSE: Duration = Duration::from_millis(50);
const DIAL: Duration = Duration::from_secs(3);
/// Time for another store to give up its port.
const TAKEN: Duration = Duration::from_secs(2);
/// Limit for the system to answer the first request of an attempt; later ones have twice as long each.
const FIRST_DIAL: Duration = Duration::from_millis(100);

/// Derives the key of the token.
pub(super) fn psk(token: Option<&Token>) -> Result<Psk, Error> {
    Psk::new(token)
        .map_err(|why| Error::System { what: "deriving the key of the token", message: why.to_string() })
}

/// Opens a connection within `within`. The system repeats a lost request after a second, and a flooded listener loses some: so
/// requests are given up early and made again.
pub(super) fn dial_within(addr: SocketAddr, within: Duration) -> std::io::Result<TcpStream> {
    let (until, mut limit) = (link::after(within), FIRST_DIAL);
    loop {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&addr, left.min(limit)) {
            Err(error) if error.kind() == ErrorKind::TimedOut && left > limit => limit *= 2,
            result => return result,
        }
    }
}

/// Failure of a handshake.
pub(super) enum CallFailed {
    Why(Why),
    Refused(Refusal),
}

impl From<Why> for CallFailed {
    fn from(why: Why) -> Self {
        CallFailed::Why(why)
    }
}

/// Caller's handshake on a fresh connection: both sides prove that they know the token.
pub(super) fn introduce(
    stream: &Arc<TcpStream>,
    psk: &Psk,
    header: &CallHeader,
    hello: &[u8],
    until: Instant,
    patience: Duration,
) -> Result<(Receiver, Sender), CallFailed> {
    let (mut receiver, mut sender) = link::ends(stream, patience)?;
    let (greeted, greeting) = greet(psk, header, hello)?;
    sender.payload(&greeting)?;
    let reply = receiver.payload(until)?;
    let (verdict, session) = greeted.finish(&reply)?;
    match Message::decode(&verdict) {
        Some(Message::Welcome) => {}
        Some(Message::Refused(refusal)) => return Err(CallFailed::Refused(refusal)),
        _ => return Err(Why::NotUnderstood.into()),
    }
    link::encrypt(&mut receiver, &mut sender, session);
    // The confirmation: the greeting was no recording.
    sender.payload(&[])?;
    Ok((receiver, sender))
}

/// Opens rank 0's socket. A store that is about to end, of an earlier start or of this process, may have its port for a moment.
pub(super) fn listen(environment: &Environment, until: Instant) -> Result<TcpListener, Error> {
    let until = until.min(link::after(TAKEN));
    loop {
        match listen_once(environment) {
            Err(Error::PortTaken { .. }) if Instant::now() + PAUSE < until => std::thread::sleep(PAUSE),
            result => return result,
        }
    }
}

/// Tries the first of the host's addresses that belongs to this machine, and no other.
fn listen_once(environment: &Environment) -> Result<TcpListener, Error> {
    let no_address = |message| Error::NoAddress { host: environment.host.clone(), message };
    if environment.endpoint().len() > MAX_NAME {
        return Err(no_address(format!("it has more than {MAX_NAME} bytes")));
    }
    let addrs = resolve(environment).map_err(|error| no_address(error.to_string()))?;
    let mut last = no_address("it has none".to_owned());
    for addr in addrs {
        allowed(&environment.host, environment.token.as_ref(), addr)?;
        match TcpListener::bind(addr) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = refused(addr, &error),
        }
        if matches!(last, Error::PortTaken { .. }) {
            break;
        }
    }
    Err(last)
}

pub(super) fn refused(addr: SocketAddr, error: &std::io::Error) -> Error {
    match error.kind() {
        ErrorKind::AddrInUse => Error::PortTaken { addr },
        ErrorKind::AddrNotAvailable => Error::NotLocal { addr },
        _ => Error::System { what: "opening a socket for the store", message: format!("{addr}: {error}") },
    }
}

fn resolve(environment: &Environment) -> std::io::Result<impl Iterator<Item = SocketAddr>> {
    (environment.host.as_str(), environment.port).to_socket_addrs()
}

/// Checks that `addr` is one interface's address, and that it is a loopback address or the job has a token.
pub(super) fn allowed(host: &str, token: Option<&Token>, addr: SocketAddr) -> Result<(), Error> {
    if addr.ip().is_unspecified() {
        let message = "it stands for every interface".to_owned();
        return Err(Error::NoAddress { host: host.to_owned(), message });
    }
    match token {
        None if !addr.ip().is_loopback() => Err(Error::TokenNeeded { addr }),
        _ => Ok(()),
    }
}

/// Seated connection to the store.
pub(super) struct StorePlace {
    pub(super) addr: SocketAddr,
    pub(super) stream: Arc<TcpStream>,
    pub(super) receiver: Receiver,
    pub(super) sender: Sender,
}

/// Retries until `until`; permanent errors return at once.
pub(super) fn connect(
    environment: &Environment,
    options: &Options,
    until: Instant,
) -> Result<StorePlace, Error> {
    if environment.endpoint().len() > MAX_NAME {
        let message = format!("it has more than {MAX_NAME} bytes");
        return Err(Error::NoAddress { host: environment.host.clone(), message });
    }
    loop {
        let last = match attempt(environment, options, until)? {
            Ok(place) => return Ok(place),
            Err(last) => last,
        };
        if Instant::now() + PAUSE >= until {
            let (host, port, after) = (environment.host.clone(), environment.port, options.deadline);
            return Err(Error::Unreachable { host, port, after, last });
        }
        // The system has no notification for a new listener.
        std::thread::sleep(PAUSE);
    }
}

/// The inner error describes the failed attempt, for the message if it was the last one.
fn attempt(
    environment: &Environment,
    options: &Options,
    until: Instant,
) -> Result<Result<StorePlace, String>, Error> {
    let addrs = match resolve(environment) {
        Ok(addrs) => addrs,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let mut last = "the name has no address".to_owned();
    for addr in addrs {
        allowed(&environment.host, environment.token.as_ref(), addr)?;
        match dial(environment, options, addr, until)? {
            Ok(place) => return Ok(Ok(place)),
            Err(why) => last = format!("{addr}: {why}"),
        }
    }
    Ok(Err(last))
}

fn dial(
    environment: &Environment,
    options: &Options,
    addr: SocketAddr,
    until: Instant,
) -> Result<Result<StorePlace, Why>, Error> {
    let left = until.saturating_duration_since(Instant::now()).clamp(Duration::from_millis(1), DIAL);
    let stream = match dial_within(addr, left) {
        Ok(stream) => Arc::new(stream),
        Err(error) => return Ok(Err(Why::System { message: error.to_string() })),
    };
    if stream.local_addr().is_ok_and(|local| local == addr) {
        // Without a listener, the system may give the socket the very port that it calls.
        return Ok(Err(Why::Closed));
    }
    let claim = claim(environment);
    let psk = psk(environment.token.as_ref())?;
    match join(&stream, &psk, environment, &claim, options, until) {
        Ok((receiver, sender)) => Ok(Ok(StorePlace { addr, stream, receiver, sender })),
        Err(failed) => judge(failed, environment, &claim, addr).map(Err),
    }
}

/// Greets the store and takes its decision on the claim.
fn join(
    stream: &Arc<TcpStream>,
    psk: &Psk,
    environment: &Environment,
    claim: &Claim,
    options: &Options,
    until: Instant,
) -> Result<(Receiver, Sender), CallFailed> {
    let header = CallHeader { purpose: server::PURPOSE.to_owned(), endpoint: environment.endpoint() };
    let hello = claim.encode();
    let (mut receiver, sender) = introduce(stream, psk, &header, &hello, until, options.silence)?;
    let first = receiver.payload(until)?;
    match Message::decode_batch(&first).as_deref() {
        Some([Message::Welcome]) => Ok((receiver, sender)),
        Some([Message::Refused(refusal)]) => Err(CallFailed::Refused(refusal.clone())),
        _ => Err(Why::NotUnderstood.into()),
    }
}

/// Returns the reason of a failed attempt that may succeed later, or the error of one that cannot.
fn judge(
    failed: CallFailed,
    environment: &Environment,
    claim: &Claim,
    addr: SocketAddr,
) -> Result<Why, Error> {
    match failed {
        // This is the store of the previous start, which is about to end.
        CallFailed::Refused(Refusal::OtherRestart { store }) if store < environment.restart => {
            Ok(Why::System {
                message: format!("the store is of restart {store}, this rank is of a later one"),
            })
        }
        // The job has ended in order and begins again.
        CallFailed::Refused(Refusal::RankLeft) => {
            Ok(Why::System { message: "this rank has left it, and it has not ended".to_owned() })
        }
        CallFailed::Refused(Refusal::OtherEndpoint { listener }) => {
            Err(Error::OtherEndpoint { addr, endpoint: environment.endpoint(), listener })
        }
        CallFailed::Refused(refusal) => Err(explain(refusal, claim, addr)),
        CallFailed::Why(why) => match permanent(&why, addr) {
            Some(error) => Err(error),
            None => Ok(why),
        },
    }
}

/// Returns the error of a reason that another attempt would not change.
pub(super) fn permanent(why: &Why, addr: SocketAddr) -> Option<Error> {
    match why {
        Why::WrongToken => Some(Error::WrongToken { addr }),
        Why::OtherVersion { theirs } => Some(Error::OtherVersion { addr, mine: VERSION, theirs: *theirs }),
        Why::Closed | Why::Silent { .. } | Why::System { .. } => None,
        Why::TooLong { .. } | Why::Forged | Why::NotUnderstood | Why::OtherPurpose | Why::OtherEndpoint => {
            Some(Error::NotAStore { addr, why: why.clone() })
        }
    }
}

fn claim(environment: &Environment) -> Claim {
    let Environment { rank, world_size, run_id, restart, .. } = environment;
    Claim { run_id: run_id.clone(), restart: *restart, rank: *rank, world_size: *world_size }
}

fn explain(refusal: Refusal, claim: &Claim, addr: SocketAddr) -> Error {
    let Claim { rank, world_size, restart, .. } = *claim;
    match refusal {
        Refusal::OtherRun { store } => Error::OtherRun { addr, run_id: claim.run_id.clone(), store },
        Refusal::OtherRestart { store } => Error::OtherRestart { restart, store },
        Refusal::OtherWorldSize { store } => Error::WorldSize { rank, world_size, store },
        Refusal::RankTaken => Error::SameRank { rank },
        Refusal::RankGone | Refusal::RankLeft => Error::RankGone { rank },
        Refusal::OtherPurpose { .. } => Error::NotAStore { addr, why: Why::OtherPurpose },
        Refusal::OtherEndpoint { .. } => Error::NotAStore { addr, why: Why::OtherEndpoint },
    }
}
