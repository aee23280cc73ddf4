//! Tests of the benchmark's own kernels.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and print why they skip"
)]

#[cfg(feature = "cuda")]
mod cuda;
