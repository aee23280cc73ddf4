//! Tests of the crate's public interface. Tests that need no GPU are beside the code.
#![cfg(feature = "cuda")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

mod cuda;
