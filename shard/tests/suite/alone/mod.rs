//! Failures on one rank alone, of its memory or of a call of its communicator: the others get an error at once, without waiting.

mod calls;
mod memory;

use meshstep_comm::{Communicator, loopback};
use meshstep_shard::Error;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Long enough for calls that succeed, short enough to wait for ones that fail.
const DEADLINE: Duration = Duration::from_secs(20);

/// The rank with the failure.
const ODD: usize = 1;

/// Returns the result of each rank; no rank leaves before all have ended.
fn ends<T: Send>(ranks: usize, body: impl Fn(Arc<dyn Communicator>) -> T + Sync) -> Vec<T> {
    let config = loopback::Config { timeout: DEADLINE, ..loopback::Config::new(ranks) };
    let all = std::sync::Barrier::new(ranks);
    let ends = loopback::spawn_with(config, |comm| {
        let end = catch_unwind(AssertUnwindSafe(|| body(Arc::clone(&comm))));
        all.wait();
        drop(comm);
        end.unwrap_or_else(|panic| resume_unwind(panic))
    });
    ends.unwrap()
}

/// Returns true if the error names the failed rank, and is not a timeout.
fn names_odd(error: &Error) -> bool {
    match error {
        Error::Comm(failure) => *failure.cause() == meshstep_comm::Error::Aborted { rank: ODD },
        Error::Disagree { what, rank, rank0, .. } => {
            what == "this call" && *rank == ODD && rank0 == "no objection"
        }
        Error::ClosureElsewhere { rank } => *rank == ODD,
        _ => false,
    }
}
