//! Whole runs of `run.sh` on bundles whose programs are shell scripts, and of the bundle's Python on a stand-in for torch.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests, and what they share, which say what is wrong by failing"
)]

mod bundle;
mod endings;
mod modes;
mod torch;
mod verdicts;
