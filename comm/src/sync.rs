//! Locks, condition variables and threads: the standard library's, or a deterministic scheduler's when a test with the
//! `shuttle` feature runs inside one.

pub(crate) mod real;
#[cfg(feature = "shuttle")]
mod simulated;

#[cfg(not(feature = "shuttle"))]
pub(crate) use real::{Condvar, Counter, Guard, Mutex, on_threads, spawn};
#[cfg(feature = "shuttle")]
pub(crate) use simulated::{Condvar, Counter, Guard, Mutex, on_threads, spawn};
