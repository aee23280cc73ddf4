//! Tests of the crate's public interface, one module per subject. The shuttle tests are a separate program, because they replace
//! the threads.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

mod allocations;
mod backends;
mod collectives;
#[cfg(feature = "conformance")]
mod conformance;
mod equality;
mod examples;
mod failures;
#[cfg(target_os = "linux")]
mod joining;
mod keeping;
mod naive;
#[cfg(feature = "nccl")]
mod nccl;
mod observing;
mod one_pass;
mod overlap;
#[cfg(unix)]
mod processes;
#[cfg(target_os = "linux")]
mod registered;
mod rendezvous;
mod split;
mod stats;
mod writing;
