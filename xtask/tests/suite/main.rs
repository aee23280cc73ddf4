//! Tests of xtask as a program.

#[cfg(target_os = "linux")]
mod launch;
#[cfg(target_os = "linux")]
mod launched;
