//! The cases that both `cargo bench -p meshstep-bench-cases` and `cargo xtask bench` measure: what runs, and how many bytes it
//! must move at least. Nothing here prints.
#![allow(
    missing_docs,
    missing_debug_implementations,
    clippy::unwrap_used,
    reason = "for benchmarks, which say what is wrong by failing"
)]

pub mod budget;
pub mod collectives;
pub mod copies;
pub mod exchange;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod machine;
pub mod peers;
pub mod race;
pub mod ranks;
pub mod record;
pub mod samples;
pub mod shapes;
pub mod step;
pub mod update;
