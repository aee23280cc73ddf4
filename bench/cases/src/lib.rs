//! Cases that both `cargo bench -p meshstep-bench-cases` and `cargo xtask bench` measure: the work, and the minimum number
//! of bytes that it moves. The crate prints nothing.
#![allow(
    missing_docs,
    missing_debug_implementations,
    clippy::unwrap_used,
    reason = "for benchmarks, which report faults by failing"
)]

pub mod budget;
pub mod collectives;
pub mod copies;
pub mod exchange;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod machine;
pub mod peers;
pub mod processes;
pub mod race;
pub mod ranks;
pub mod record;
pub mod samples;
pub mod shapes;
pub mod step;
pub mod update;
