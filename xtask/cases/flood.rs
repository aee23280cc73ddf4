//! A flood of strangers on a listener: a thousand connections from nine loopback addresses, replaced as they are cut.

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Connections from one address, and from several.
const CONNECTIONS: usize = 500;
/// Interval at which connections that were cut are replaced.
const SWEEP: Duration = Duration::from_millis(50);

/// Behaviour of the flood's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Sends nothing.
    Silent,
    /// Sends a well-formed beginning byte by byte.
    Slow,
    /// Sends a request of another protocol.
    Garbage,
    /// Sends a greeting of somebody who does not know the token.
    Guess,
}

impl Way {
    /// All of them.
    pub const ALL: [Way; 4] = [Way::Silent, Way::Slow, Way::Garbage, Way::Guess];

    /// Bytes of a stranger, and how many of them it sends at a time.
    fn bytes(self) -> (Vec<u8>, usize) {
        let greeting =
            |len: u32| [&len.to_le_bytes()[..], b"mstp\x02\x05\x00store\x00\x00", &[7; 1024]].concat();
        match self {
            Way::Silent => (Vec::new(), 1),
            Way::Slow => (greeting(1000), 1),
            Way::Garbage => (b"GET / HTTP/1.1\r\n\r\n".to_vec(), 18),
            Way::Guess => (greeting(200)[..204].to_vec(), 204),
        }
    }
}

/// Keeps connections to an address open, and replaces those that are cut.
#[derive(Debug)]
pub struct Flood {
    stop: Arc<AtomicBool>,
    opened: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl Flood {
    /// Opens 500 connections from 127.0.0.1, the source of honest callers, and 500 from eight other addresses.
    ///
    /// # Panics
    /// If the system opens no sockets.
    pub fn start(to: SocketAddr, way: Way) -> Self {
        let (stop, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let start = |sources: Vec<u8>| {
            let (stop, opened) = (Arc::clone(&stop), Arc::clone(&opened));
            thread::spawn(move || flood(to, way, &sources, &stop, &opened))
        };
        let threads = vec![start(vec![1]), start((2..10).collect())];
        let flood = Flood { threads, stop: Arc::clone(&stop), opened: Arc::clone(&opened) };
        while opened.load(Relaxed) < 2 * CONNECTIONS {
            thread::yield_now();
        }
        flood
    }

    /// Ends the flood; returns how many connections it has opened.
    ///
    /// # Panics
    /// If one of its threads did.
    pub fn stop(self) -> usize {
        self.stop.store(true, Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        self.opened.load(Relaxed)
    }
}

fn flood(to: SocketAddr, way: Way, sources: &[u8], stop: &AtomicBool, opened: &AtomicUsize) {
    let (bytes, at_once) = way.bytes();
    let mut connections: Vec<Option<(OwnedFd, usize)>> = (0..CONNECTIONS).map(|_| None).collect();
    while !stop.load(Relaxed) {
        let begin = Instant::now();
        for (number, connection) in connections.iter_mut().enumerate() {
            if connection.as_ref().is_none_or(|(socket, _)| is_cut(socket)) {
                *connection = open(to, sources[number % sources.len()]).map(|socket| (socket, 0));
                opened.fetch_add(usize::from(connection.is_some()), Relaxed);
            }
            if let Some((socket, sent)) = connection {
                let next = &bytes[*sent..bytes.len().min(*sent + at_once)];
                // A connection that is not established yet sends at the next sweep.
                *sent += rustix::net::send(&*socket, next, SendFlags::NOSIGNAL).unwrap_or(0);
            }
        }
        thread::sleep(SWEEP.saturating_sub(begin.elapsed()));
    }
}

/// Begins to connect from 127.0.0.`source`. A closed connection leaves no port in use.
fn open(to: SocketAddr, source: u8) -> Option<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO)).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::new(127, 0, 0, source), 0))).ok()?;
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Some(socket),
        Err(_) => None,
    }
}

fn is_cut(socket: &OwnedFd) -> bool {
    match rustix::net::recv(socket, &mut [0u8; 64][..], RecvFlags::empty()) {
        Ok((len, _)) => len == 0,
        Err(error) => !matches!(error, Errno::AGAIN | Errno::NOTCONN),
    }
}
