//! All tests of the crate's public interface, one module per subject.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    unreachable_pub,
    reason = "tests fail by panicking, say what they skip, and share freely"
)]

mod absent;
mod alignment;
mod chaos;
#[cfg(feature = "cuda")]
mod cuda;
mod delayed;
#[cfg(feature = "checkpoint")]
mod disk;
#[cfg(unix)]
mod elastic;
mod equal;
mod examples;
mod failures;
mod follow;
mod in_place;
mod limits;
mod means;
mod naive;
mod one_sided;
mod plan;
mod processes;
mod random;
mod regroup;
mod replicas;
mod rounds;
#[cfg(feature = "checkpoint")]
mod saving;
mod traffic;
mod trajectories;
mod verified;
mod weighted;

use meshstep_shard_cases as common;
