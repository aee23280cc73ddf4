//! Ranks on NCCL, or on the stand-ins for NCCL and the driver (`cargo xtask ci --only standin`).
#![cfg(feature = "nccl")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

mod bench;
mod collectives;
mod failures;
mod graphs;
mod misuse;
#[allow(dead_code, reason = "loopback's tests have more kinds of data")]
#[path = "../common/naive.rs"]
mod naive;
mod overlap;
mod processes;
mod programs;
mod rebuild;
