//! Ranks on threads of their own, and the checks of one rank.

use super::Nonconformance;
use super::values::Sample;
use crate::{Communicator, Error, Op};
use meshstep_tensor::{Buffer, Category, Meter};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of calls with a checked result.
pub(super) type CheckedCalls = Result<u64, Nonconformance>;

/// Body of a part: the checks of one rank.
pub(super) type PartFn = fn(&RankChecks) -> CheckedCalls;

/// One rank of a world under test.
pub(super) struct RankChecks {
    pub(super) comm: Arc<dyn Communicator>,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// Number of the world within its part.
    pub(super) round: usize,
    /// Meeting of the threads beside the backend.
    meeting: Arc<Barrier>,
    doing: Arc<Mutex<String>>,
}

/// Runs `body` on each rank of a world, and returns the number of checked calls, or the first deviation.
pub(super) fn run(
    (part, round): (&'static str, usize),
    world: Vec<Arc<dyn Communicator>>,
    (ranks, limit): (usize, Duration),
    body: PartFn,
) -> CheckedCalls {
    identify(part, &world, ranks)?;
    let (ended, ends) = channel();
    let meeting = Arc::new(Barrier::new(ranks));
    let mut doing = Vec::new();
    for (rank, comm) in world.into_iter().enumerate() {
        let now: Arc<Mutex<String>> = Arc::default();
        doing.push(Arc::clone(&now));
        let rank_checks = RankChecks { comm, rank, ranks, round, meeting: Arc::clone(&meeting), doing: now };
        let ended = ended.clone();
        let thread = std::thread::Builder::new().name(format!("conformance-{rank}"));
        let spawned = thread.spawn(move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| body(&rank_checks)));
            let outcome = outcome.unwrap_or_else(|panic| Err(rank_checks.panicked(&*panic)));
            // The outcome goes first: others fail once this rank leaves, and theirs must not hide it.
            let _ = ended.send((rank, outcome));
            drop(rank_checks);
        });
        spawned.map_err(|error| Nonconformance::NoWorld { ranks, message: error.to_string() })?;
    }
    drop(ended);
    let (begin, mut missing, mut calls) = (Instant::now(), vec![true; ranks], 0);
    for _ in 0..ranks {
        match ends.recv_timeout(limit.saturating_sub(begin.elapsed())) {
            Ok((rank, outcome)) => (calls, missing[rank]) = (calls + outcome?, false),
            Err(RecvTimeoutError::Disconnected | RecvTimeoutError::Timeout) => {
                let operation = |rank: usize| locked(&doing[rank]);
                let waiting = (0..ranks).filter(|rank| missing[*rank]).map(|rank| (rank, operation(rank)));
                return Err(Nonconformance::Hangs { part, ranks, waiting: waiting.collect(), after: limit });
            }
        }
    }
    Ok(calls)
}

fn locked(text: &Mutex<String>) -> String {
    text.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Checks that the communicators are those of the ranks, in order.
fn identify(part: &'static str, world: &[Arc<dyn Communicator>], ranks: usize) -> Result<(), Nonconformance> {
    let wrong = |rank, found| Err(Nonconformance::Identity { part, ranks, rank, found });
    if world.len() != ranks {
        return wrong(world.len(), format!("one of {} communicators", world.len()));
    }
    let odd =
        world.iter().enumerate().find(|(rank, comm)| (comm.rank(), comm.world_size()) != (*rank, ranks));
    odd.map_or(Ok(()), |(rank, comm)| wrong(rank, format!("rank {} of {}", comm.rank(), comm.world_size())))
}

impl RankChecks {
    fn panicked(&self, panic: &(dyn std::any::Any + Send)) -> Nonconformance {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let message = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message").to_owned();
        Nonconformance::Panics { operation: self.operation(), ranks: self.ranks, rank: self.rank, message }
    }

    /// Names the operation that follows, for errors.
    pub(super) fn begin(&self, operation: impl Into<String>) {
        *self.doing.lock().unwrap_or_else(PoisonError::into_inner) = operation.into();
    }

    fn operation(&self) -> String {
        locked(&self.doing)
    }

    /// Waits for the other threads, without the backend.
    pub(super) fn meet(&self) {
        self.meeting.wait();
    }

    /// Returns the value of an operation that must succeed.
    pub(super) fn ok<T, E: Into<Error>>(&self, result: Result<T, E>) -> Result<T, Nonconformance> {
        result.map_err(|error| Nonconformance::Failed {
            operation: self.operation(),
            ranks: self.ranks,
            rank: self.rank,
            error: error.into(),
        })
    }

    /// Makes a fact that differs from the interface an error.
    pub(super) fn hold(&self, holds: bool, found: impl FnOnce() -> String) -> Result<(), Nonconformance> {
        if holds {
            return Ok(());
        }
        let (operation, ranks, rank) = (self.operation(), self.ranks, self.rank);
        Err(Nonconformance::Broken { operation, ranks, rank, found: found() })
    }

    /// Returns a buffer with these values.
    pub(super) fn buffer<T: Sample>(&self, values: &[T]) -> Result<Buffer, Nonconformance> {
        self.ok(Buffer::from_slice(values, &Meter::new(), Category::Grads))
    }

    /// Compares a range of a buffer with the expected values, which begin at the range's start.
    pub(super) fn equal<T: Sample>(
        &self,
        buffer: &Buffer,
        range: Range<usize>,
        expected: &[T],
    ) -> Result<(), Nonconformance> {
        let found = self.ok(buffer.typed::<T>())?;
        self.hold(found.len() >= range.end, || {
            format!("the buffer came back with {} elements", found.len())
        })?;
        let mut pairs = range.clone().zip(found[range].iter().zip(expected));
        match pairs.find(|(_, (found, expected))| found != expected) {
            None => Ok(()),
            Some((element, (found, expected))) => Err(Nonconformance::Value {
                operation: self.operation(),
                ranks: self.ranks,
                rank: self.rank,
                element,
                found: format!("{found:?}"),
                expected: format!("{expected:?}"),
            }),
        }
    }

    /// Checks that an operation failed with an error that `fits`.
    pub(super) fn refused<T>(
        &self,
        outcome: Result<T, Error>,
        expected: &str,
        fits: impl FnOnce(&Error) -> bool,
    ) -> Result<(), Nonconformance> {
        let found = match outcome {
            Err(error) if fits(error.cause()) => return Ok(()),
            Err(error) => format!("the error: {error}"),
            Ok(_) => "success".to_owned(),
        };
        let (operation, expected) = (self.operation(), expected.to_owned());
        Err(Nonconformance::Unrefused { operation, ranks: self.ranks, rank: self.rank, found, expected })
    }

    /// Runs an operation on zeros of f32.
    pub(super) fn call(&self, comm: &Arc<dyn Communicator>, op: Op, len: usize) -> Result<(), Error> {
        comm.run(op, &mut Buffer::from_slice(&vec![0f32; len], &Meter::new(), Category::Grads)?)
    }
}
