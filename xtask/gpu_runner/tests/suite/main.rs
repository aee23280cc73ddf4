//! Whole runs of `run.sh` on bundles of shell scripts, and of the bundle's Python script on a stand-in for torch.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "test code reports faults by failing, and prints why it skips"
)]

mod bundle;
mod endings;
mod modes;
mod torch;
mod verdicts;
