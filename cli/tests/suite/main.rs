//! Tests of `meshstep` as a program.

#[cfg(target_os = "linux")]
mod launch;
#[cfg(target_os = "linux")]
mod launched;
mod parity;
mod plan;
mod shells;
