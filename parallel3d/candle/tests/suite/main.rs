//! Tests of the crate's public interface, one module for each subject.
#![allow(clippy::unwrap_used, unreachable_pub, reason = "tests fail by panicking, and share freely")]

#[cfg(feature = "checkpoint")]
mod checkpoint;
mod common;
mod equal;
#[cfg(feature = "nn")]
mod examples;
#[cfg(feature = "parallel")]
mod parallel;
mod refusals;
mod tape;
mod values;
mod wrappers;
