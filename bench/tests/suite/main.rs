//! The program `meshstep-bench`, started as a user would.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    missing_docs,
    reason = "tests fail by panicking, and say what they skip"
)]

#[cfg(feature = "cuda")]
mod cuda;
mod parity;
