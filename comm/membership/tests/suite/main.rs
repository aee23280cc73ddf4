//! Tests of the crate's public interface, one module a subject: workers that join, leave, stop and die, and an arbiter that does too.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    unreachable_pub,
    reason = "tests fail by panicking and say what they skip"
)]

mod chaos;
mod common;
mod in_process;
mod log;
mod machines;
mod messages;
mod processes;
mod remote;
mod simulated;
mod standby;
mod training;
