//! Tests of `meshstep` as a program.

#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[cfg(target_os = "linux")]
mod launch;
#[cfg(target_os = "linux")]
mod launched;
mod parity;
mod plan;
mod shells;
