//! The cases that both `cargo bench -p meshstep-bench-cases` and `cargo xtask bench` measure: what runs, and how many bytes it
//! must move at least. Nothing here prints.
#![allow(
    missing_docs,
    missing_debug_implementations,
    clippy::unwrap_used,
    reason = "for benchmarks, which say what is wrong by failing"
)]

pub mod collectives;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod step;
pub mod update;
