//! Layers that are spread over ranks, against the same layers on one rank: results and gradients.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod collectives;
mod common;
mod failures;
mod layers;
mod network;
