//! Tests of streams between ranks, as threads and as processes.

mod allocations;
mod carry;
mod common;
mod damage;
mod fakes;
mod faults;
#[cfg(target_os = "linux")]
mod flood;
mod joining;
mod mixed;
mod processes;
mod records;
mod relay;
