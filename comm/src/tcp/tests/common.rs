//! Ranks as threads with real sockets, and the bytes that they exchange.

use crate::p2p::transport::{Lost, Source, Target, Transport};
use crate::rendezvous::{self, Environment, Token};
use crate::tcp::meeting::{WorldStreams, meet};
use crate::tcp::{Encrypt, Error, Options};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

pub(super) const HEX: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
/// Longer than any test should take.
pub(super) const LONG: Duration = Duration::from_secs(20);

/// Returns a free address of `ip`.
pub(super) fn free_addr(ip: &str) -> SocketAddr {
    TcpListener::bind((ip.parse::<IpAddr>().unwrap(), 0)).unwrap().local_addr().unwrap()
}

pub(super) fn environment(addr: SocketAddr, rank: usize, world_size: usize) -> Environment {
    Environment {
        rank,
        world_size,
        local_rank: rank,
        host: addr.ip().to_string(),
        port: addr.port(),
        run_id: "run".to_owned(),
        restart: 0,
        token: Some(Token::from_hex(HEX).unwrap()),
    }
}

pub(super) fn options(encrypt: Encrypt) -> Options {
    let rendezvous = rendezvous::Options { deadline: LONG, ..rendezvous::Options::default() };
    Options { rendezvous, encrypt, connect: LONG, shared_memory: false, ..Options::default() }
}

/// Joins on a thread for each environment and runs `body` there; returns the results in order.
pub(super) fn join_all<T: Send>(
    environments: &[Environment],
    options: impl Fn(usize) -> Options + Sync,
    body: impl Fn(WorldStreams) -> T + Sync,
) -> Vec<Result<T, Error>> {
    let (options, body) = (&options, &body);
    thread::scope(|scope| {
        let start = |environment: &'_ Environment| {
            let environment = environment.clone();
            scope.spawn(move || meet(&environment, &options(environment.rank)).map(body))
        };
        let threads: Vec<_> = environments.iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `body` on `n` ranks that have joined at `ip`.
pub(super) fn on_ranks<T: Send>(
    n: usize,
    ip: &str,
    encrypt: Encrypt,
    body: impl Fn(WorldStreams) -> T + Sync,
) -> Vec<T> {
    let addr = free_addr(ip);
    let environments: Vec<_> = (0..n).map(|rank| environment(addr, rank, n)).collect();
    let results = join_all(&environments, |_| options(encrypt), body);
    results.into_iter().map(Result::unwrap).collect()
}

/// Long streams repeat a block of this length, which no record has.
const BLOCK: usize = 50_021;

/// Generator of reproducible bytes: the stream from one rank to another under a seed.
#[derive(Clone)]
pub(super) struct Bytes(u64);

impl Bytes {
    pub(super) fn new(seed: u64, from: usize, to: usize) -> Self {
        Bytes((seed << 16 | (from as u64) << 8 | to as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(super) fn take(&mut self, len: usize) -> Vec<u8> {
        let words = (0..len.min(BLOCK).div_ceil(8)).flat_map(|_| self.number().to_le_bytes());
        let block: Vec<u8> = words.take(BLOCK).collect();
        let mut bytes = Vec::with_capacity(len + BLOCK);
        while bytes.len() < len {
            bytes.extend_from_slice(&block);
        }
        bytes.truncate(len);
        bytes
    }
}

/// Exchange of one rank: writes and reads `len` bytes to and from every other rank, in pieces of random lengths.
pub(super) struct Exchange {
    seed: u64,
    outgoing: Vec<(Vec<u8>, usize)>,
    incoming: Vec<Vec<u8>>,
    len: usize,
    dice: Bytes,
    pub(super) until: Instant,
}

impl Exchange {
    pub(super) fn new(transport: &dyn Transport, seed: u64, len: usize) -> Self {
        let (me, n) = (transport.rank(), transport.world_size());
        let outgoing = (0..n).map(|to| (Bytes::new(seed, me, to).take(len), 0)).collect();
        let dice = Bytes::new(seed ^ 0x5555, me, me);
        Exchange { seed, outgoing, incoming: vec![Vec::new(); n], len, dice, until: Instant::now() + LONG }
    }

    /// Runs to the end or to the loss of a rank, and compares every byte that has arrived.
    pub(super) fn run(mut self, transport: &mut dyn Transport) -> Result<(), Lost> {
        let result = loop {
            match self.turn(transport) {
                Ok(false) => assert!(Instant::now() < self.until, "hangs with {:?} left", self.left()),
                Ok(true) => break Ok(()),
                Err(lost) => break Err(lost),
            }
        };
        self.compare(transport.rank());
        result?;
        // Short writes leave with this call.
        transport.progress().map(drop)
    }

    /// Compares what has arrived with what was sent.
    pub(super) fn compare(&self, me: usize) {
        for (from, bytes) in self.incoming.iter().enumerate().filter(|(from, _)| *from != me) {
            let sent = Bytes::new(self.seed, from, me).take(self.len);
            assert!(bytes[..] == sent[..bytes.len()], "altered bytes from rank {from} to {me}");
        }
    }

    /// Bytes that are to be written and read.
    fn left(&self) -> (usize, usize) {
        let written: usize = self.outgoing.iter().map(|(bytes, done)| bytes.len() - done).sum();
        (written, self.incoming.iter().map(|bytes| self.len - bytes.len()).sum())
    }

    /// Moves what can be moved; returns true at the end.
    pub(super) fn turn(&mut self, transport: &mut dyn Transport) -> Result<bool, Lost> {
        let (mut moved, mut done) = (transport.progress()?, true);
        let me = transport.rank();
        for peer in (0..transport.world_size()).filter(|peer| *peer != me) {
            moved |= self.write(transport, peer)? | self.read(transport, peer)?;
            done &= self.outgoing[peer].1 == self.len && self.incoming[peer].len() == self.len;
        }
        if !moved && !done {
            transport.wait(Duration::from_millis(100))?;
        }
        Ok(done)
    }

    fn write(&mut self, transport: &mut dyn Transport, to: usize) -> Result<bool, Lost> {
        let piece = self.piece();
        let (bytes, done) = &mut self.outgoing[to];
        let rest = &bytes[*done..];
        let len = transport.write(Target::Rank(to), &rest[..rest.len().min(piece)])?;
        *done += len;
        Ok(len > 0)
    }

    fn read(&mut self, transport: &mut dyn Transport, from: usize) -> Result<bool, Lost> {
        let (len, piece, straight) =
            (self.incoming[from].len(), self.piece(), self.dice.number().is_multiple_of(2));
        let want = piece.min(self.len - len);
        if want == 0 {
            // A look at the stream of a rank that has left would be an error.
            return Ok(false);
        }
        if straight {
            let mut into = vec![0; want];
            let len = transport.read(Source::Rank(from), &mut into)?;
            self.incoming[from].extend(&into[..len]);
            return Ok(len > 0);
        }
        let arrived = transport.arrived(Source::Rank(from));
        let taken = arrived[..arrived.len().min(want)].to_vec();
        transport.consume(Source::Rank(from), taken.len());
        self.incoming[from].extend(&taken);
        Ok(!taken.is_empty())
    }

    /// Length of a piece: mostly short or long.
    fn piece(&mut self) -> usize {
        let n = self.dice.number();
        [1, 40, 4096, 100_000, 300_000, 2_000_000][(n >> 8) as usize % 6] + (n >> 32) as usize % 64
    }
}
