//! Groups of threads, and blocking reads and writes.

use super::super::MemoryListener;
use crate::p2p::transport::{Lost, Source, Target, Transport};
use crate::shared_memory::RingBytes;
use std::time::{Duration, Instant};

/// Limit of a test that goes well.
pub(super) const LONG: Duration = Duration::from_secs(30);
/// Smallest rings: they are full and wrap around soon.
pub(super) const SMALL: RingBytes = RingBytes { single: 1 << 16, common: 1 << 16 };

/// Returns the transports of `n` ranks of this process.
pub(super) fn world(n: usize, rings: RingBytes) -> Vec<Box<dyn Transport>> {
    let listeners: Vec<MemoryListener> = (0..n).map(|_| MemoryListener::open(rings).unwrap()).collect();
    let cards: Vec<Vec<u8>> = listeners.iter().map(MemoryListener::card).collect();
    let ranks = listeners.into_iter().enumerate();
    std::thread::scope(|scope| {
        let meet = |(rank, listener): (usize, MemoryListener)| {
            let cards = &cards;
            scope.spawn(move || listener.connect(rank, cards, LONG, || false).unwrap())
        };
        let threads: Vec<_> = ranks.map(meet).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `body` on each rank, in a thread of its own, and drops the ranks when all are done.
pub(super) fn on_each(n: usize, rings: RingBytes, body: impl Fn(&mut dyn Transport) + Sync) {
    std::thread::scope(|scope| {
        let run = |mut rank: Box<dyn Transport>| {
            let body = &body;
            scope.spawn(move || {
                body(&mut *rank);
                rank
            })
        };
        let threads: Vec<_> = world(n, rings).into_iter().map(run).collect();
        let ranks: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        drop(ranks);
    });
}

/// Writes all bytes, and waits for room.
pub(super) fn write_all(rank: &mut dyn Transport, to: Target, mut bytes: &[u8]) -> Result<(), Lost> {
    let begin = Instant::now();
    while !bytes.is_empty() {
        let written = rank.write(to, bytes)?;
        bytes = &bytes[written..];
        if written == 0 {
            // The next write fails if the loss concerns it.
            let _ = rank.wait(LONG);
        }
        assert!(begin.elapsed() < LONG, "{to:?}: {} bytes are left", bytes.len());
    }
    Ok(())
}

/// Reads until `into` is full.
pub(super) fn read_all(rank: &mut dyn Transport, from: Source, mut into: &mut [u8]) -> Result<(), Lost> {
    let begin = Instant::now();
    while !into.is_empty() {
        let read = rank.read(from, into)?;
        into = &mut into[read..];
        if read == 0 {
            // The next read fails if the loss concerns it.
            let _ = rank.wait(LONG);
        }
        assert!(begin.elapsed() < LONG, "{from:?}: {} bytes are missing", into.len());
    }
    Ok(())
}

/// Waits until the loss of a peer is reported; returns it and the time it took.
pub(super) fn wait_lost(rank: &mut dyn Transport) -> (Lost, Duration) {
    let begin = Instant::now();
    while begin.elapsed() < LONG {
        if let Err(lost) = rank.wait(LONG) {
            return (lost, begin.elapsed());
        }
    }
    panic!("no loss within {LONG:?}");
}

/// Random bytes that depend on the seed alone.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 11) as usize % bound
    }

    pub(super) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.next() >> 32) as u8).collect()
    }
}
