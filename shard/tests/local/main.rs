//! Workers that step alone and meet seldom.
#![allow(
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test fails by panicking, and its modules share freely"
)]

mod absent;
mod alignment;
#[path = "../common/mod.rs"]
mod common;
mod equal;
mod failures;
mod follow;
mod limits;
mod means;
mod naive;
mod one_sided;
mod plan;
mod regroup;
mod replicas;
mod rounds;
#[cfg(feature = "checkpoint")]
mod saving;
#[cfg(feature = "checkpoint")]
#[path = "../checkpoint/sim.rs"]
#[allow(dead_code, reason = "checkpoints are tested with all of it")]
mod sim;
mod traffic;
mod trajectories;
mod verified;
mod weighted;
