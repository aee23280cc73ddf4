//! Locks, condition variables and threads: the standard library's, or a deterministic scheduler's when a test with the
//! `shuttle` feature runs inside one.

#[cfg(feature = "shuttle")]
mod simulated;
#[cfg(not(feature = "shuttle"))]
mod std;

#[cfg(feature = "shuttle")]
pub(crate) use self::simulated::*;
#[cfg(not(feature = "shuttle"))]
pub(crate) use self::std::*;
