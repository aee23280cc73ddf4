//! Ranks as threads of one process, exchanging buffers through shared memory.
//!
//! Every operation is one meeting: all ranks say what they are about to do, the calls are compared, the ranks draw
//! portions of the elements and move them until none is left (of a small operation the rank that comes last moves all), and
//! only when all are done does any buffer come back. Each
//! rank's own communication thread does this while the caller computes; a caller that waits does it itself.

mod cut;
mod lane;
mod meeting;
mod moves;
mod rank;
mod shared;
mod verdict;
mod worker;

use crate::sync::{Mutex, on_threads};
use crate::{Clock, Communicator, Error, Faults};
use meeting::{Group, Seat};
use rank::{End, Life, Loopback};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// How many ranks, and what rules their operations.
#[derive(Clone, Debug)]
pub struct Config {
    /// Ranks in the world; at least one.
    pub ranks: usize,
    /// How long an operation waits for the other ranks, unless it says so itself.
    pub timeout: Duration,
    /// What deadlines and delays are measured by.
    pub clock: Clock,
    /// What is to go wrong, in tests.
    pub faults: Faults,
}

impl Config {
    /// `ranks` ranks, ten minutes of patience, the machine's time, no faults.
    pub fn new(ranks: usize) -> Self {
        let timeout = Duration::from_secs(600);
        Config { ranks, timeout, clock: Clock::real(), faults: Faults::none() }
    }
}

/// Runs `body` on `ranks` ranks, each on a thread of its own, and returns what they return, by rank.
///
/// When `body` returns, its rank has left, in every group it was in. When it panics, the others' operations fail with
/// [`Error::Panicked`]; once all have ended, so does this call, naming the rank that panicked first.
pub fn spawn<T: Send>(
    ranks: usize,
    body: impl Fn(Arc<dyn Communicator>) -> T + Sync,
) -> Result<Vec<T>, Error> {
    spawn_with(Config::new(ranks), body)
}

/// As [`spawn`], with other settings.
pub fn spawn_with<T: Send>(
    config: Config,
    body: impl Fn(Arc<dyn Communicator>) -> T + Sync,
) -> Result<Vec<T>, Error> {
    let first_panic = Mutex::new(None);
    let run = |handle: Loopback| {
        let (rank, life) = (handle.rank(), handle.life());
        life.watch();
        let result = catch_unwind(AssertUnwindSafe(|| body(Arc::new(handle))));
        let panicked = result.as_ref().err().map(|payload| message(payload.as_ref()));
        if let Some(message) = panicked.clone() {
            first_panic.lock().get_or_insert(Error::Panicked { rank, message });
        }
        life.end(&panicked.map_or(End::Left, End::Panicked));
        result.ok()
    };
    let results = on_threads(handles(config)?, run);
    if let Some(error) = first_panic.lock().take() {
        return Err(error);
    }
    let result = |(rank, result): (usize, std::io::Result<Option<T>>)| match result {
        Ok(Some(value)) => Ok(value),
        Ok(None) => Err(Error::Panicked { rank, message: message(&()) }),
        Err(error) => Err(Error::NoThread { rank, message: error.to_string() }),
    };
    results.into_iter().enumerate().map(result).collect()
}

/// The communicators of all ranks, for threads of the caller's own. Each rank leaves when its last handle is dropped;
/// while its thread panics, that counts as a panic.
pub fn world(config: Config) -> Result<Vec<Arc<dyn Communicator>>, Error> {
    Ok(handles(config)?.into_iter().map(|handle| Arc::new(handle) as _).collect())
}

fn handles(config: Config) -> Result<Vec<Loopback>, Error> {
    let Config { ranks, timeout, clock, faults } = config;
    if ranks == 0 {
        return Err(Error::ZeroRanks);
    }
    let group = Group::new(ranks, clock, timeout);
    let handle = |rank| {
        let seat = Seat { group: Arc::clone(&group), rank };
        Loopback::new(seat, Arc::<Life>::default(), faults.clone())
    };
    (0..ranks).map(handle).collect()
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}
