//! Replicas of a mesh that step alone and meet seldom are workers of one rank each, bit for bit.
#![allow(
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test fails by panicking, and its modules share freely"
)]

#[cfg(feature = "checkpoint")]
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
mod elastic;
mod equal;
mod refused;
mod worker;
