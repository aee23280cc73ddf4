//! Options of a communicator, and its interface to a rendezvous.

use crate::{Clock, Error};
use meshstep_tensor::Meter;
use std::fmt::{self, Debug};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Options of a communicator. Groups split from it inherit them.
#[derive(Clone, Debug)]
pub struct Options {
    /// Limit for joining, and default deadline of each operation, counted from the end of the work before it: ten minutes.
    pub deadline: Duration,
    /// Limit for ending, by a finalize or an abort: thirty seconds. Beyond it [`last_resort`](Self::last_resort) is called.
    pub abort_within: Duration,
    /// Clock of deadlines.
    pub clock: Clock,
    /// Counts the communicator's own memory: the copies of `all_to_all`, and a few words.
    pub meter: Meter,
    /// If true, ranks compare their calls before each call, as mismatched calls hang in NCCL: slow; on by default if
    /// MESHSTEP_COMM_CHECK=1. A `send` is compared with its `recv` only.
    pub check: bool,
    /// Folder for the last operations of a communicator that fails: MESHSTEP_FLIGHT_RECORDER.
    pub flight_recorder: Option<PathBuf>,
    /// Channel for ranks' failure reports.
    pub exchange: Option<Arc<dyn Exchange>>,
    /// Called if an abort does not end: exits the process by default. It must not create a communicator.
    pub last_resort: LastResort,
    /// If true, memory from [`zeroed_on`](crate::Communicator::zeroed_on) comes from NCCL's allocator and can be registered as
    /// windows; the same on every rank. NCCL before 2.27 is an error. Off by default: it has not been measured on GPUs, and NCCL
    /// requires that operations on symmetric windows begin at the same offset on every rank, which the own chunk of an in-place
    /// operation does not.
    pub windows: bool,
    /// GPU of a [`Job`](super::Job)'s rank, as an ordinal of the visible ones. `None`: that of the rank's index on its machine,
    /// or the only visible one.
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

/// Interface to a rendezvous: it distributes a few bytes before there is a communicator, and failure reports beside it.
pub trait Exchange: Send + Sync + Debug {
    /// Sets `key` to `value` for all ranks.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), Error>;

    /// Waits for the value of `key` and returns it.
    fn get(&self, key: &str, within: Duration) -> Result<Vec<u8>, Error>;

    /// Reports to the other ranks that `rank` has failed. Called on a detached thread.
    fn publish_failure(&self, rank: usize, message: &str);

    /// Returns a failed rank and its message. Polled ten times a second: it must return at once, from local state.
    fn failure(&self) -> Option<(usize, String)>;
}

/// Called if even an abort of NCCL hangs, so that neither memory nor device can be recovered.
#[derive(Clone)]
pub struct LastResort(Arc<dyn Fn(&Error) + Send + Sync>);

impl LastResort {
    /// Calls `f` with the failure that could not be ended. Resources that it leaves behind are not freed.
    pub fn new(f: impl Fn(&Error) + Send + Sync + 'static) -> Self {
        LastResort(Arc::new(f))
    }

    pub(super) fn call(&self, cause: &Error) {
        (self.0)(cause);
    }
}

impl Default for LastResort {
    /// Aborts the process with a message, without its exit handlers, which may also wait for NCCL.
    fn default() -> Self {
        LastResort::new(|cause| {
            use std::io::Write as _;
            // An error of this write has no reader.
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
