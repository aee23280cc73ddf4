//! Tests of the crate's public interface, one module for each subject.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    unreachable_pub,
    reason = "tests fail by panicking, say what they skip, and share freely"
)]

mod accounting;
mod bad_input;
#[cfg(feature = "checkpoint")]
mod checkpoint;
mod common;
mod communicators;
mod lbfgs;
mod local;
mod matrices;
mod mesh;
mod mixed_rules;
mod models;
mod muon;
mod norms;
mod placement;
mod plans;
#[cfg(unix)]
mod processes;
mod schedules;
mod search;
mod steps;
mod stochastic;
mod verify;
mod verify_faults;
mod wrappers;
