//! A backend of one's own, checked by the conformance suite: `cargo run -p meshstep-comm --features conformance --example
//! custom_backend`.
//!
//! The backend counts the bytes of all buffers that its ranks hand over, and leaves the work to loopback. A backend must implement six
//! methods of `Communicator`; the others have defaults on top of these.

#![allow(clippy::print_stdout)] // a program

use meshstep_comm::conformance::{self, Nonconformance};
use meshstep_comm::{Communicator, Error, InFlight, Op, Stats, loopback};
use meshstep_tensor::{Buffer, Queue};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One rank's handle.
#[derive(Debug)]
struct CountedRank {
    inner: Arc<dyn Communicator>,
    bytes: Arc<AtomicU64>,
}

impl Communicator for CountedRank {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    /// A backend without another below it begins with `op.check(..)`, which refuses a caller's mistakes.
    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, Error)> {
        self.bytes.fetch_add(buffer.bytes() as u64, Relaxed);
        self.inner.start(op, buffer, after)
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let group = self.inner.split(color, key)?;
        Ok(group.map(|inner| Arc::new(CountedRank { inner, bytes: Arc::clone(&self.bytes) }) as _))
    }

    fn abort(&self) {
        self.inner.abort();
    }

    fn sound(&self) -> Result<(), Error> {
        self.inner.sound()
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }
}

/// Ranks of a new world.
fn world(ranks: usize, bytes: &Arc<AtomicU64>) -> Result<Vec<Arc<dyn Communicator>>, Error> {
    let inner = loopback::world(loopback::Config::new(ranks))?;
    Ok(inner
        .into_iter()
        .map(|inner| Arc::new(CountedRank { inner, bytes: Arc::clone(bytes) }) as _)
        .collect())
}

pub(crate) fn run() -> Result<String, Nonconformance> {
    let bytes = Arc::default();
    let report = conformance::check(|ranks| world(ranks, &bytes))?;
    let counted = bytes.load(Relaxed) > 1_000_000;
    Ok(format!("{report}\nmore than a million bytes were handed over: {counted}\n"))
}

fn main() -> Result<(), Nonconformance> {
    print!("{}", run()?);
    Ok(())
}
