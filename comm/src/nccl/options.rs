//! What rules a communicator, and what it needs of a rendezvous.

use crate::{Clock, Error};
use meshstep_tensor::Meter;
use std::fmt::{self, Debug};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How a communicator behaves. Groups split off from it behave alike.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long joining takes at most, and each operation that says nothing else, from when the work before it is done: ten
    /// minutes.
    pub deadline: Duration,
    /// How long ending may take, well or by an abort: thirty seconds. Beyond it [`last_resort`](Self::last_resort) is called.
    pub abort_within: Duration,
    /// What deadlines are measured by.
    pub clock: Clock,
    /// Counts the memory of its own: a copy of what `all_to_all` moves, and a few words.
    pub meter: Meter,
    /// Whether ranks compare what they call before each call, as a mismatch of calls is a hang for NCCL: slow, and on where
    /// MESHSTEP_COMM_CHECK=1. A `send` is compared with its `recv` only.
    pub check: bool,
    /// A folder for the last operations of a communicator that fails: MESHSTEP_FLIGHT_RECORDER.
    pub flight_recorder: Option<PathBuf>,
    /// Where ranks hear of one another's failures.
    pub exchange: Option<Arc<dyn Exchange>>,
    /// What is done when an abort does not end: the process exits.
    pub last_resort: LastResort,
    /// Whether memory from [`zeroed_on`](crate::Communicator::zeroed_on) is NCCL's own, and registered as windows; the same on
    /// every rank. An NCCL before 2.27 is refused. Off: it has not been measured on GPUs, and NCCL asks of symmetric windows that
    /// operations begin at the same offset on every rank, which the own chunk of an operation in place does not.
    pub windows: bool,
    /// The GPU of a [`Job`](super::Job)'s rank, as the driver counts the visible ones. None: the one of the rank's number on its
    /// machine; where one GPU is visible, that one.
    pub device: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            deadline: Duration::from_secs(600),
            abort_within: Duration::from_secs(30),
            clock: Clock::real(),
            meter: Meter::new(),
            check: std::env::var_os("MESHSTEP_COMM_CHECK").is_some_and(|value| value == "1"),
            flight_recorder: std::env::var_os("MESHSTEP_FLIGHT_RECORDER").map(PathBuf::from),
            exchange: None,
            last_resort: LastResort::default(),
            windows: false,
            device: None,
        }
    }
}

/// What a rendezvous does for this backend: it spreads a few bytes before there is a communicator, and failures beside it.
pub trait Exchange: Send + Sync + Debug {
    /// Gives `value` to whoever asks for `key`.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), Error>;

    /// What some rank has given to `key`, waiting for it.
    fn get(&self, key: &str, within: Duration) -> Result<Vec<u8>, Error>;

    /// Tells the other ranks that `rank` has failed. Called on a thread of its own, which nobody waits for.
    fn publish_failure(&self, rank: usize, message: &str);

    /// A rank that has failed, and what it said. Asked ten times a second: it answers at once, from what it knows.
    fn failure(&self) -> Option<(usize, String)>;
}

/// Called where NCCL does not even end when it is told to, so that neither memory nor device can be had back.
#[derive(Clone)]
pub struct LastResort(Arc<dyn Fn(&Error) + Send + Sync>);

impl LastResort {
    /// Calls `f` with the failure that could not be ended. Nothing that it leaves behind is freed.
    pub fn new(f: impl Fn(&Error) + Send + Sync + 'static) -> Self {
        LastResort(Arc::new(f))
    }

    pub(super) fn call(&self, cause: &Error) {
        (self.0)(cause);
    }
}

impl Default for LastResort {
    /// Ends the process with a message, without running what it has registered for its end, which may wait for NCCL too.
    fn default() -> Self {
        LastResort::new(|cause| {
            use std::io::Write as _;
            // There is nobody left to tell where this fails.
            let _ = writeln!(std::io::stderr(), "meshstep: NCCL cannot be ended ({cause}); the process ends");
            std::process::abort();
        })
    }
}

impl Debug for LastResort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LastResort")
    }
}
