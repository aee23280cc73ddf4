//! Reference passes: the memory's speed when it is read, written, and read and written in place, measured in the same run as the
//! work and on the same kind of pages.

use std::hint::black_box;

use anyhow::Result;
use meshstep_comm::Communicator;
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Threads};

use crate::samples::Samples;

/// Size of a pass that exceeds all caches.
pub const LARGE_BYTES: usize = 256 << 20;

/// Least number of elements of a part, as in an update.
const PART: usize = 32 << 10;

/// A way to pass over memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPass {
    Read,
    Write,
    /// Each word is read and written back.
    InPlace,
}

/// All passes, in the order of their turns.
pub const PASSES: [MemoryPass; 3] = [MemoryPass::Read, MemoryPass::Write, MemoryPass::InPlace];

impl MemoryPass {
    pub fn name(self) -> &'static str {
        match self {
            MemoryPass::Read => "read",
            MemoryPass::Write => "write",
            MemoryPass::InPlace => "in place (read and write)",
        }
    }

    /// Returns the bytes that a pass over `bytes` bytes moves.
    pub fn moved(self, bytes: usize) -> f64 {
        let each = if self == MemoryPass::InPlace { 2.0 } else { 1.0 };
        each * bytes as f64
    }
}

/// Memory that passes run over, allocated as the vectors of the work: on huge pages if it is large.
#[derive(Debug)]
pub struct Pages(Buffer);

impl Pages {
    /// Allocates memory as an optimizer does.
    pub fn new(bytes: usize) -> Result<Self> {
        let buffer = Buffer::zeroed(bytes / DType::U64.size(), DType::U64, &Meter::new(), Category::Grads)?;
        Ok(Pages(buffer).touched())
    }

    /// Allocates memory as buffers of collectives, which is shared between ranks if these are processes of one host.
    pub fn of_communicator(comm: &dyn Communicator, bytes: usize) -> Result<Self> {
        let (len, meter) = (bytes / DType::U64.size(), Meter::new());
        let buffer = comm.zeroed_on(&Queue::cpu(), len, DType::U64, (&meter, Category::Grads), &[])?;
        Ok(Pages(buffer).touched())
    }

    fn touched(mut self) -> Self {
        self.pass(MemoryPass::Write, &Threads::shared());
        self
    }

    /// Returns the bytes of a pass, of which [`MemoryPass::InPlace`] moves twice as many.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Runs a pass over all of the memory.
    pub fn pass(&mut self, pass: MemoryPass, threads: &Threads) {
        match pass {
            MemoryPass::Read => read(self.0.typed::<u64>().unwrap(), threads),
            MemoryPass::Write => write(self.0.typed_mut().unwrap(), threads),
            MemoryPass::InPlace => in_place(self.0.typed_mut().unwrap(), threads),
        }
    }
}

/// Reads all of `words`.
pub fn read(words: &[u64], threads: &Threads) {
    let part = threads.part_len(words.len(), PART);
    let work = |all: &mut u64, part: &[u64]| *all = part.iter().fold(*all, |all, word| all ^ word);
    black_box(threads.fold(words.chunks(part), || 0, work, |all, other| *all ^= other));
}

/// Writes all of `words`, and reads none.
fn write(words: &mut [u64], threads: &Threads) {
    let (word, part) = (black_box(1), threads.part_len(words.len(), PART));
    threads.for_each(words.chunks_mut(part), |part| part.fill(word));
}

/// Reads all of `words` and writes them back unchanged: the mask is zero, but the compiler does not know that.
fn in_place(words: &mut [u64], threads: &Threads) {
    let (mask, part) = (black_box(0), threads.part_len(words.len(), PART));
    threads.for_each(words.chunks_mut(part), |part| part.iter_mut().for_each(|word| *word ^= mask));
}

/// Seconds of the passes in the rounds of a race, and the bytes that each pass runs over.
#[derive(Clone, Debug)]
pub struct PassTimes {
    pub seconds: [Samples; 3],
    pub bytes: usize,
}

impl PassTimes {
    /// Returns the bytes per second of a pass.
    pub fn speed(&self, pass: MemoryPass) -> f64 {
        pass.moved(self.bytes) / self.seconds[pass as usize].median().median
    }

    /// Returns the seconds that bytes take which are only read, only written, and read and written in place, each at its own speed.
    pub fn price(&self, bytes: MovedBytes) -> Samples {
        let MovedBytes { read, written, in_place } = bytes;
        let of = |pass: MemoryPass, bytes: usize| {
            self.seconds[pass as usize].times(bytes as f64 / pass.moved(self.bytes))
        };
        of(MemoryPass::Read, read)
            .plus(&of(MemoryPass::Write, written))
            .plus(&of(MemoryPass::InPlace, in_place))
    }
}

/// Bytes that some work moves: only read, only written, and in place, where a byte that is read and written counts twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedBytes {
    pub read: usize,
    pub written: usize,
    pub in_place: usize,
}

impl MovedBytes {
    pub fn total(self) -> usize {
        self.read + self.written + self.in_place
    }

    /// Returns this for `n` times the work.
    pub fn times(self, n: usize) -> Self {
        MovedBytes { read: n * self.read, written: n * self.written, in_place: n * self.in_place }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_leave_what_they_read_and_write_the_rest() {
        let mut pages = Pages::new(1 << 12).unwrap();
        let threads = Threads::shared();
        PASSES.into_iter().for_each(|pass| pages.pass(pass, &threads));
        assert_eq!((pages.bytes(), pages.0.typed::<u64>().unwrap()), (1 << 12, &[1; 512][..]));
    }

    #[test]
    fn each_kind_of_bytes_has_the_price_of_its_pass() {
        let seconds = [2.0, 4.0, 6.0].map(|seconds| [seconds].into_iter().collect());
        let passes = PassTimes { seconds, bytes: 100 };
        let price =
            |read, written, in_place| passes.price(MovedBytes { read, written, in_place }).median().median;
        assert_eq!(
            (price(100, 0, 0), price(0, 100, 0), price(0, 0, 200), price(50, 50, 100)),
            (2.0, 4.0, 6.0, 6.0)
        );
        assert_eq!(PASSES.map(|pass| passes.speed(pass)), [50.0, 25.0, 200.0 / 6.0]);
        assert_eq!(PASSES.map(|pass| pass as usize), [0, 1, 2]);
    }
}
