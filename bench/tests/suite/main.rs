//! Tests that start the program `meshstep-bench` as a user would.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests fail by panicking, and print why they skip"
)]

#[cfg(feature = "cuda")]
mod cuda;
mod network;
#[cfg(target_os = "linux")]
mod preemption;
mod workers;
