//! Locks, condition variables and threads: the standard library's, or shuttle's inside a test with the `shuttle` feature.

mod condvar;
#[cfg(test)]
#[cfg(not(miri))]
mod model;
mod primitives;
pub(crate) mod real;
#[cfg(feature = "shuttle")]
mod simulated;
pub(crate) mod yields;

#[cfg(not(feature = "shuttle"))]
pub(crate) use real::{Condvar, Counter, Guard, Mutex, on_threads, spawn};
#[cfg(feature = "shuttle")]
pub(crate) use simulated::{Condvar, Counter, Guard, Mutex, on_threads, spawn};
