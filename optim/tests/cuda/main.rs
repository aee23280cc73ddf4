//! What runs on a GPU gives the CPU's bits: on the real thing, or on the stand-in (`cargo xtask ci --only standin`).
#![cfg(feature = "cuda")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

#[path = "../common/mod.rs"]
mod common;
mod flat;
mod gpu;
mod lbfgs;
mod norm;
mod step;
mod update;
