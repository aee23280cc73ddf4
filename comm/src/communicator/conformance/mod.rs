//! Conformance suite for backends: every operation of a [`Communicator`] on 1 to 4 ranks, against loops over all ranks' values.
//!
//! ```
//! use meshstep_comm::{conformance, loopback};
//!
//! let report = conformance::check(|ranks| loopback::world(loopback::Config::new(ranks)))?;
//! println!("{report}");
//! # Ok::<(), conformance::Nonconformance>(())
//! ```
//!
//! | part | checks |
//! |---|---|
//! | `collectives` | each [`Op`](crate::Op) with each type, reduction, root and pair, on buffers of 0 to some thousand elements, even and odd |
//! | `rounding` | random f32: all ranks get the same bits, close to the sum in f64; NaN in a maximum |
//! | `order` | operations that are started together run in the order of their starts, and are waited for in another |
//! | `written` | kept, observed and written reductions and gathers, and memory of the backend |
//! | `groups` | splits by color and key, groups of groups, and the parent beside them |
//! | `refusals` | a caller's mistakes: the typed error, the buffer back, and a communicator that goes on |
//! | `mismatches` | ranks that call different operations, lengths or types: an error on every rank, and on every later call |
//! | `abort` | an abort ends waiting operations on every rank, and in groups below |
//! | `departure` | a rank that leaves ends the operations that need it |
//! | `deadline` | an operation without its other ranks ends with an error |
//!
//! Values are small integers, whose sums are exact in every type: a backend may add in any order.
//!
//! # Limits
//!
//! Ranks are threads of one process, and buffers lie in memory of the CPU. Ranks that never end stay behind.

mod collectives;
mod failures;
mod groups;
mod report;
mod seat;
mod values;
mod written;

pub use report::{CheckedPart, Conformance, Nonconformance};

use crate::Communicator;
use seat::{PartFn, run};
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

/// Numbers of ranks of the worlds that are checked.
const RANKS: [usize; 4] = [1, 2, 3, 4];

/// Parts of the suite, in their order, and the least number of ranks of each.
const PARTS: [(&str, usize, PartFn); 10] = [
    ("collectives", 1, collectives::exact),
    ("rounding", 1, collectives::rounding),
    ("order", 1, collectives::order),
    ("written", 1, written::check),
    ("groups", 1, groups::check),
    ("refusals", 1, failures::refusals),
    ("mismatches", 2, failures::mismatches),
    ("abort", 1, failures::abort),
    ("departure", 2, failures::departure),
    ("deadline", 2, failures::deadline),
];

/// Checks a backend. `connect` makes a new world of so many ranks and returns the communicators by rank; it is called several times for
/// each number of ranks, as a failure ends a world. Each communicator moves to a thread of its own.
///
/// # Errors
/// The first deviation, on the rank that found it first.
pub fn check<E: Display>(
    connect: impl FnMut(usize) -> Result<Vec<Arc<dyn Communicator>>, E>,
) -> Result<Conformance, Nonconformance> {
    check_within(Duration::from_secs(120), connect)
}

/// Same as [`check`], with another time than two minutes after which ranks that have not ended a part count as hanging.
pub fn check_within<E: Display>(
    limit: Duration,
    mut connect: impl FnMut(usize) -> Result<Vec<Arc<dyn Communicator>>, E>,
) -> Result<Conformance, Nonconformance> {
    let mut parts = Vec::new();
    for (part, least, body) in PARTS {
        let mut calls = 0;
        for ranks in RANKS.into_iter().filter(|ranks| *ranks >= least) {
            // A mismatch ends the world, so each kind of mismatch gets a new world.
            let rounds = if part == "mismatches" { failures::MISMATCHES } else { 1 };
            for round in 0..rounds {
                let world = connect(ranks)
                    .map_err(|error| Nonconformance::NoWorld { ranks, message: error.to_string() })?;
                calls += run((part, round), world, (ranks, limit), body)?;
            }
        }
        parts.push(CheckedPart { name: part, calls });
    }
    Ok(Conformance { ranks: RANKS.to_vec(), parts })
}
