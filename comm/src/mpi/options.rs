//! Options of the world.

use super::ThreadLevel;
use std::time::Duration;

/// Options of the world, and of all groups that are split from it.
#[derive(Clone, Debug)]
pub struct Options {
    /// Limit for joining and, if no operation has failed, for the wait for the other ranks at the end; default deadline of each
    /// operation: ten minutes.
    pub deadline: Duration,
    /// Limit for the wait for the other ranks at the end of a world that has failed: two seconds. They get their errors in this
    /// time; then MPI_Abort ends the job.
    pub abort_within: Duration,
    /// Level of thread support to ask the library for. A library that gives [`Serialized`](ThreadLevel::Serialized) is called
    /// under a lock, and one that gives less is refused. Without meaning if the program has initialised MPI itself.
    pub threads: ThreadLevel,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            deadline: Duration::from_secs(600),
            abort_within: Duration::from_secs(2),
            threads: ThreadLevel::Multiple,
        }
    }
}
