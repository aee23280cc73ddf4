//! Bytes between all pairs of ranks at once.

use meshstep_comm::mpi::testing::TestStreams;
use std::time::{Duration, Instant};

/// Random numbers that every rank can repeat.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        bytes.fill_with(|| (self.next() >> 24) as u8);
    }
}

/// Bytes from one rank to another.
struct Side {
    content: Random,
    sizes: Random,
    left: usize,
    /// Bytes that were drawn and not written.
    pending: Vec<u8>,
}

impl Side {
    fn new(seed: u64, len: usize, sizes: u64) -> Self {
        Side { content: Random::new(seed), sizes: Random::new(sizes), left: len, pending: Vec::new() }
    }

    /// A length for the next piece: mostly short, at times several tiles.
    fn piece(&mut self) -> usize {
        let bits = self.sizes.next() % 19;
        ((self.sizes.next() >> 20) as usize & ((1 << bits) - 1)).min(self.left)
    }

    fn write(&mut self, world: &mut TestStreams, to: usize) -> bool {
        if self.pending.is_empty() {
            let len = self.piece();
            self.pending.resize(len, 0);
            self.left -= self.pending.len();
            self.content.fill(&mut self.pending);
        }
        let written = world.write(to, &self.pending).unwrap();
        self.pending.drain(..written);
        written > 0
    }

    fn read(&mut self, world: &mut TestStreams, from: usize) -> bool {
        let mut bytes = vec![0; self.piece()];
        let read = world.read(from, &mut bytes).unwrap();
        let mut expected = vec![0; read];
        self.content.fill(&mut expected);
        assert!(bytes[..read] == expected, "bytes from rank {from} differ, {} before the end", self.left);
        self.left -= read;
        read > 0
    }

    fn is_done(&self) -> bool {
        self.left == 0 && self.pending.is_empty()
    }
}

/// Exchanges `len` random bytes in each direction of each pair, in pieces of random lengths.
pub(crate) fn exchange_len(world: &mut TestStreams, len: usize, seed: u64) {
    let (me, ranks) = (world.rank(), world.world_size());
    let pair = |from: usize, to: usize| seed + 1 + (from * ranks + to) as u64;
    let others = || (0..ranks).filter(move |&rank| rank != me);
    let mut out: Vec<_> = others().map(|to| (to, Side::new(pair(me, to), len, 3 + pair(me, to)))).collect();
    let mut into: Vec<_> =
        others().map(|from| (from, Side::new(pair(from, me), len, 5 * pair(me, from)))).collect();
    let began = Instant::now();
    while out.iter().chain(&into).any(|(_, side)| !side.is_done()) {
        let mut moved = false;
        for (to, side) in out.iter_mut().filter(|(_, side)| !side.is_done()) {
            moved |= side.write(world, *to);
        }
        for (from, side) in into.iter_mut().filter(|(_, side)| !side.is_done()) {
            moved |= side.read(world, *from);
        }
        moved |= unless_done(world.progress());
        if !moved {
            unless_done(world.wait(Duration::from_millis(10)).map(|()| true));
        }
        assert!(began.elapsed() < Duration::from_secs(40), "rank {me} of {ranks} hangs");
    }
    unless_done(world.progress());
}

/// A rank that has all its bytes may leave before the others: its end is no failure, as its bytes have arrived before.
fn unless_done(moved: Result<bool, String>) -> bool {
    moved.unwrap_or_else(|error| {
        assert!(error.ends_with("its process closed it"), "{error}");
        true
    })
}

pub(crate) fn exchange(world: &mut TestStreams) {
    for (seed, len) in [1, 0, 65_535, 65_536, 65_537, 3_000_000].into_iter().enumerate() {
        exchange_len(world, len, 1000 * seed as u64);
    }
}

/// Writes all bytes.
pub(crate) fn write_all(world: &mut TestStreams, to: usize, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let written = world.write(to, bytes).unwrap();
        bytes = &bytes[written..];
        world.progress().unwrap();
    }
}

/// Reads until `bytes` is full.
pub(crate) fn read_all(world: &mut TestStreams, from: usize, bytes: &mut [u8]) {
    let (mut read, began) = (0, Instant::now());
    while read < bytes.len() {
        read += world.read(from, &mut bytes[read..]).unwrap();
        if read < bytes.len() {
            world.wait(Duration::from_millis(1)).unwrap();
        }
        assert!(began.elapsed() < Duration::from_secs(40), "{read} of {} bytes have arrived", bytes.len());
    }
}

/// Sends 256 MiB to the next rank, and prints the bandwidth.
pub(crate) fn large(world: &mut TestStreams) {
    let (next, previous) = (1 - world.rank(), 1 - world.rank());
    let (sent, mut received) = (vec![0xa5; 1 << 20], vec![0; 1 << 20]);
    let began = Instant::now();
    let (mut to_write, mut to_read) = (256usize << 20, 256usize << 20);
    while to_write > 0 || to_read > 0 {
        let len = to_write.min(sent.len());
        let written = world.write(next, &sent[..len]).unwrap();
        let read = world.read(previous, &mut received).unwrap();
        assert!(received[..read] == sent[..read], "bytes differ {to_read} before the end");
        (to_write, to_read) = (to_write - written, to_read - read);
        if !unless_done(world.progress()) && written + read == 0 {
            unless_done(world.wait(Duration::from_millis(1)).map(|()| true));
        }
    }
    println!("{:.2} GB/s in each direction", 0.268_435_456 / began.elapsed().as_secs_f64());
}

/// A reader that does not read bounds what is written, and gets all of it later.
pub(crate) fn slow_reader(world: &mut TestStreams) {
    let tile = vec![7; 1 << 16];
    if world.rank() == 0 {
        let (mut written, began) = (0, Instant::now());
        while began.elapsed() < Duration::from_millis(500) {
            written += world.write(1, &tile[..1000]).unwrap();
            world.progress().unwrap();
        }
        assert!(written > 0 && written <= 1 << 20, "{written} bytes were accepted");
        write_all(world, 1, &written.to_le_bytes());
        read_all(world, 1, &mut [0]);
    } else {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(1) {
            world.wait(Duration::from_millis(50)).unwrap();
        }
        let (mut all, mut some) = (Vec::new(), vec![0; 1 << 16]);
        while all.len() < 8 || all.len() - 8 != usize::from_le_bytes(*all.last_chunk().unwrap()) {
            let read = world.read(0, &mut some).unwrap();
            all.extend_from_slice(&some[..read]);
            world.progress().unwrap();
        }
        assert!(all[..all.len() - 8].iter().all(|&byte| byte == 7));
        write_all(world, 0, &[1]);
    }
}

/// Another thread ends a wait.
pub(crate) fn waker(world: &mut TestStreams) {
    while world.progress().unwrap() {}
    let wake = world.waker();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        wake();
    });
    let began = Instant::now();
    world.wait(Duration::from_secs(20)).unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "the wait took {:?}", began.elapsed());
    thread.join().unwrap();
    let began = Instant::now();
    world.wait(Duration::from_millis(100)).unwrap();
    assert!(began.elapsed() >= Duration::from_millis(90), "one call ends one wait");
}
