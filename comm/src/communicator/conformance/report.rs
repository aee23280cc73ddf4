//! Result of the suite: the checked calls, or the first deviation.

use crate::Error;
use std::fmt;
use std::time::Duration;

/// Report on a backend that conforms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conformance {
    /// Numbers of ranks that were tried.
    pub ranks: Vec<usize>,
    /// The parts of the suite.
    pub parts: Vec<CheckedPart>,
}

/// Part of the suite that a backend has passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedPart {
    /// Name of the part.
    pub name: &'static str,
    /// Number of calls with a checked result, over all ranks of all worlds.
    pub calls: u64,
}

impl fmt::Display for Conformance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<String> = self.ranks.iter().map(usize::to_string).collect();
        write!(f, "conforms on {} ranks:", ranks.join(", "))?;
        self.parts.iter().try_for_each(|part| write!(f, "\n  {:<12} {} calls", part.name, part.calls))
    }
}

/// Deviation of a backend from the interface.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Nonconformance {
    /// The backend made no world.
    #[error("no world of {ranks} ranks: {message}")]
    NoWorld {
        /// Ranks asked for.
        ranks: usize,
        /// Error of `connect`.
        message: String,
    },
    /// The communicators are not those of one world, by rank.
    #[error("{part} on {ranks} ranks: rank {rank} is {found}")]
    Identity {
        /// Part of the suite.
        part: &'static str,
        /// Ranks of the world.
        ranks: usize,
        /// Place of the communicator.
        rank: usize,
        /// Its rank and world size, or their number.
        found: String,
    },
    /// An element has another value.
    #[error(
        "{operation} on {ranks} ranks: rank {rank} has {found} at element {element} instead of {expected}"
    )]
    Value {
        /// Operation, with reduction, length and type.
        operation: String,
        /// Ranks of the world.
        ranks: usize,
        /// Rank with the value.
        rank: usize,
        /// Index in the buffer.
        element: usize,
        /// The value.
        found: String,
        /// Value of the loop over all ranks.
        expected: String,
    },
    /// An operation failed.
    #[error("{operation} on {ranks} ranks: rank {rank} got an error: {error}")]
    Failed {
        /// Operation, with reduction, length and type.
        operation: String,
        /// Ranks of the world.
        ranks: usize,
        /// Rank with the error.
        rank: usize,
        /// The error.
        error: Error,
    },
    /// An operation that must fail did not, or failed otherwise.
    #[error("{operation} on {ranks} ranks: rank {rank} got {found} instead of {expected}")]
    Unrefused {
        /// Operation, with the reason for which it must fail.
        operation: String,
        /// Ranks of the world.
        ranks: usize,
        /// Rank of the call.
        rank: usize,
        /// Its outcome.
        found: String,
        /// The outcome of the interface.
        expected: String,
    },
    /// Something else than a value differs from the interface.
    #[error("{operation} on {ranks} ranks: rank {rank}: {found}")]
    Broken {
        /// Operation.
        operation: String,
        /// Ranks of the world.
        ranks: usize,
        /// Rank that found the deviation.
        rank: usize,
        /// The fact.
        found: String,
    },
    /// A rank panicked.
    #[error("{operation} on {ranks} ranks: rank {rank} panicked: {message}")]
    Panics {
        /// Operation that the rank was in.
        operation: String,
        /// Ranks of the world.
        ranks: usize,
        /// The rank.
        rank: usize,
        /// Message of the panic.
        message: String,
    },
    /// Ranks did not end.
    #[error("{part} on {ranks} ranks has not ended after {after:?}: {}", Waiting(.waiting))]
    Hangs {
        /// Part of the suite.
        part: &'static str,
        /// Ranks of the world.
        ranks: usize,
        /// Ranks that did not end, each with its operation.
        waiting: Vec<(usize, String)>,
        /// Time limit of the part.
        after: Duration,
    },
}

meshstep_tensor::debug_is_display!(Nonconformance);

struct Waiting<'a>(&'a [(usize, String)]);

impl fmt::Display for Waiting<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (rank, operation)) in self.0.iter().enumerate() {
            write!(f, "{}rank {rank} is in {operation}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
