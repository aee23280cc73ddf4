//! Tests of the crate's public interface, one module for each subject.
#![allow(clippy::unwrap_used, unreachable_pub, reason = "tests fail by panicking, and share freely")]

#[cfg(feature = "checkpoint")]
mod checkpoint;
mod common;
#[cfg(feature = "cuda")]
mod cuda;
mod equal;
mod example;
mod names;
mod refusals;
mod tied;
mod values;
mod wrappers;
