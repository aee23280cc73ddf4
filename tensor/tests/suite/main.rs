//! Every test of the crate's public interface. What needs no GPU is tested beside the code.
#![cfg(feature = "cuda")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

mod cuda;
