//! Socket reference: a plain program that moves a collective's bytes between ranks, over one socket for each pair. It computes nothing, or
//! no more than any reduction of checked bytes must.

use std::hint::black_box;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use meshstep_tensor::simd::{Body, Isa};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use twox_hash::XxHash3_64;

use super::Work;

/// Most bytes of one system call.
const CALL: usize = 256 << 10;

/// Time without a byte after which the other ranks count as gone.
const PATIENCE: Duration = Duration::from_secs(60);

/// One rank of the reference.
#[derive(Debug)]
pub struct Sockets {
    rank: usize,
    /// By rank; `None` for this one.
    peers: Vec<Option<TcpStream>>,
}

/// Work of the reference on each piece of bytes that it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceWork {
    /// None.
    Moves,
    /// A checksum of what is sent and of what is received, and a sum of the contributions in f64, of which nothing is written.
    ChecksAndSums,
}

impl ReferenceWork {
    fn on_sent(self, bytes: &[u8]) {
        if self == ReferenceWork::ChecksAndSums {
            black_box(XxHash3_64::oneshot(bytes));
        }
    }

    fn on_received(self, bytes: &[u8], contribution: bool) {
        self.on_sent(bytes);
        if contribution {
            self.on_contribution(bytes);
        }
    }

    fn on_contribution(self, bytes: &[u8]) {
        if self == ReferenceWork::ChecksAndSums {
            black_box(Isa::detect().run(WideSum(bytes)));
        }
    }
}

/// Sum of the f32 in these bytes.
struct WideSum<'a>(&'a [u8]);

impl Body for WideSum<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let mut lanes = [0f64; 16];
        for line in self.0.as_chunks::<64>().0 {
            for (lane, value) in lanes.iter_mut().zip(line.as_chunks::<4>().0) {
                *lane += f64::from(f32::from_le_bytes(*value));
            }
        }
        lanes.iter().sum()
    }
}

/// Bytes left to move between this rank and one other.
#[derive(Clone, Debug, Default)]
struct Left {
    to_send: Range<usize>,
    to_receive: Range<usize>,
}

impl Sockets {
    /// Connects to the ranks at `addresses`, of which `listener` is this rank's own.
    pub fn connect(rank: usize, listener: &TcpListener, addresses: &[SocketAddr]) -> Result<Self> {
        let mut peers: Vec<Option<TcpStream>> = addresses.iter().map(|_| None).collect();
        for (peer, address) in addresses.iter().enumerate().skip(rank + 1) {
            let mut stream = TcpStream::connect(address).with_context(|| format!("rank {peer}"))?;
            stream.write_all(&(rank as u64).to_le_bytes())?;
            peers[peer] = Some(stream);
        }
        for _ in 0..rank {
            let (mut stream, _) = listener.accept()?;
            let mut bytes = [0; 8];
            stream.read_exact(&mut bytes)?;
            let peer = usize::try_from(u64::from_le_bytes(bytes))?;
            ensure!(
                peer < rank && peers[peer].is_none(),
                "rank {peer} called twice, or is none below {rank}"
            );
            peers[peer] = Some(stream);
        }
        for stream in peers.iter().flatten() {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
        }
        Ok(Sockets { rank, peers })
    }

    /// Returns the work of `times` collectives on `bytes` bytes of each rank: `all_reduce`, `reduce_scatter` or `all_gather`.
    pub fn work(self, operation: &str, bytes: usize, times: usize, work: ReferenceWork) -> Result<Moves> {
        let rounds = match operation {
            "reduce_scatter" | "all_gather" => 1,
            "all_reduce" => 2,
            other => bail!("no operation {other}"),
        };
        let scatters = operation != "all_gather";
        Ok(Moves { sockets: self, memory: vec![1; bytes], rounds, scatters, times, work })
    }

    /// Exchanges a byte with each rank.
    fn barrier(&mut self) -> Result<()> {
        let mut bytes = vec![0; self.peers.len()];
        let left = (0..bytes.len()).map(|peer| Left { to_send: 0..1, to_receive: peer..peer + 1 }).collect();
        self.exchange(left, &mut bytes, (ReferenceWork::Moves, false))
    }

    /// Moves the bytes that are left, in both directions with all ranks at once.
    fn exchange(
        &mut self,
        mut left: Vec<Left>,
        memory: &mut [u8],
        work: (ReferenceWork, bool),
    ) -> Result<()> {
        left[self.rank] = Left::default();
        let mut last = Instant::now();
        while left.iter().any(|left| !left.done()) {
            let mut moved = false;
            for (peer, left) in self.peers.iter().zip(&mut left) {
                if let Some(stream) = peer {
                    moved |= left.advance(stream, memory, work)?;
                }
            }
            if moved {
                last = Instant::now();
            } else {
                ensure!(last.elapsed() < PATIENCE, "no byte within {PATIENCE:?}");
                self.wait(&left)?;
            }
        }
        Ok(())
    }

    /// Waits until a socket is ready for what is left.
    fn wait(&self, left: &[Left]) -> Result<()> {
        let pairs = self.peers.iter().zip(left).filter(|(_, left)| !left.done());
        let mut ready: Vec<PollFd<'_>> =
            pairs.filter_map(|(peer, left)| Some(PollFd::new(peer.as_ref()?, left.events()))).collect();
        let second = Timespec { tv_sec: 1, tv_nsec: 0 };
        poll(&mut ready, Some(&second))?;
        Ok(())
    }
}

impl Left {
    fn done(&self) -> bool {
        self.to_send.is_empty() && self.to_receive.is_empty()
    }

    fn events(&self) -> PollFlags {
        let mut events = PollFlags::empty();
        events.set(PollFlags::OUT, !self.to_send.is_empty());
        events.set(PollFlags::IN, !self.to_receive.is_empty());
        events
    }

    /// Moves what the socket takes and has now; returns true if that was anything. The received bytes are contributions if
    /// `contributions`.
    fn advance(
        &mut self,
        mut stream: &TcpStream,
        memory: &mut [u8],
        (work, contributions): (ReferenceWork, bool),
    ) -> Result<bool> {
        let mut moved = false;
        if !self.to_send.is_empty() {
            let end = self.to_send.end.min(self.to_send.start + CALL);
            let sent = ready(stream.write(&memory[self.to_send.start..end]))?;
            work.on_sent(&memory[self.to_send.start..self.to_send.start + sent]);
            self.to_send.start += sent;
            moved |= sent > 0;
        }
        if !self.to_receive.is_empty() {
            let end = self.to_receive.end.min(self.to_receive.start + CALL);
            let received = ready(stream.read(&mut memory[self.to_receive.start..end]))?;
            work.on_received(&memory[self.to_receive.start..self.to_receive.start + received], contributions);
            self.to_receive.start += received;
            moved |= received > 0;
        }
        Ok(moved)
    }
}

/// Returns the number of bytes; 0 if the socket is not ready.
fn ready(result: std::io::Result<usize>) -> Result<usize> {
    match result {
        Ok(0) => bail!("a rank closed its socket"),
        Ok(n) => Ok(n),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// The bytes of one collective.
#[derive(Debug)]
pub struct Moves {
    sockets: Sockets,
    memory: Vec<u8>,
    rounds: usize,
    /// True if the first round sends each rank its chunk; else it sends this rank's chunk to all.
    scatters: bool,
    times: usize,
    work: ReferenceWork,
}

impl Moves {
    /// Returns the bytes to move in a round with rank `peer`.
    fn left(&self, peer: usize, scatters: bool) -> Left {
        let part = self.memory.len() / self.sockets.peers.len();
        let chunk = |rank: usize| rank * part..(rank + 1) * part;
        let own = chunk(self.sockets.rank);
        // A reduce-scatter receives contributions to the own chunk; each is received over the other rank's sent chunk, so that the
        // reference needs no memory of its own.
        if scatters {
            Left { to_send: chunk(peer), to_receive: own }
        } else {
            Left { to_send: own, to_receive: chunk(peer) }
        }
    }
}

impl Work for Moves {
    fn run(&mut self) -> Result<f64> {
        self.sockets.barrier()?;
        let start = Instant::now();
        for round in 0..self.rounds * self.times {
            let scatters = self.scatters && round.is_multiple_of(self.rounds);
            let left = (0..self.sockets.peers.len()).map(|peer| self.left(peer, scatters)).collect();
            if scatters {
                let own: Left = self.left(self.sockets.rank, true);
                self.work.on_contribution(&self.memory[own.to_receive]);
            }
            self.sockets.exchange(left, &mut self.memory, (self.work, scatters))?;
        }
        self.sockets.barrier()?;
        Ok(start.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// Runs an operation on three ranks, each a thread whose memory is its rank plus 1; returns their memory.
    fn run(operation: &str, work: ReferenceWork) -> Vec<Vec<u8>> {
        let listeners: Vec<TcpListener> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses: Vec<SocketAddr> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
        thread::scope(|scope| {
            let rank = |(rank, listener)| {
                let addresses = &addresses;
                scope.spawn(move || {
                    let sockets = Sockets::connect(rank, listener, addresses).unwrap();
                    let mut work = sockets.work(operation, 3 << 20, 1, work).unwrap();
                    work.memory.fill(rank as u8 + 1);
                    assert!(work.run().unwrap() > 0.0);
                    work.memory
                })
            };
            let ranks: Vec<_> = listeners.iter().enumerate().map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_byte_of_a_gather_arrives() {
        for memory in run("all_gather", ReferenceWork::ChecksAndSums) {
            for (rank, chunk) in memory.chunks(1 << 20).enumerate() {
                assert!(chunk.iter().all(|byte| usize::from(*byte) == rank + 1), "chunk {rank}");
            }
        }
    }

    #[test]
    fn a_scatter_brings_each_rank_the_others_bytes() {
        for (rank, memory) in run("reduce_scatter", ReferenceWork::Moves).into_iter().enumerate() {
            for (chunk, bytes) in memory.chunks(1 << 20).enumerate() {
                let own = |byte: &u8| usize::from(*byte) == rank + 1;
                assert_eq!(bytes.iter().all(own), chunk != rank, "rank {rank}, chunk {chunk}");
                assert!(chunk != rank || !bytes.iter().any(own), "rank {rank} keeps its own bytes");
            }
        }
        assert_eq!(run("all_reduce", ReferenceWork::ChecksAndSums).len(), 3);
    }

    #[test]
    fn sums_are_of_all_values() {
        let values: Vec<u8> = (0u16..320).flat_map(|i| f32::from(i).to_le_bytes()).collect();
        assert_eq!(Isa::detect().run(WideSum(&values)), 319.0 * 160.0);
    }

    #[test]
    fn other_operations_are_refused() {
        let sockets = Sockets { rank: 0, peers: vec![None] };
        assert_eq!(
            sockets.work("sum", 8, 1, ReferenceWork::Moves).unwrap_err().to_string(),
            "no operation sum"
        );
    }
}
