//! Checkpoints: pieces, the manifest, and a disk that forgets.

#![allow(clippy::unwrap_used, reason = "tests say what is wrong by failing")]

mod beside;
#[path = "../common/mod.rs"]
mod common;
mod corpus;
mod counted;
mod crash;
mod damage;
mod edits;
mod failures;
mod faulty;
mod fuzzed;
mod holdings;
mod layouts;
mod lbfgs;
mod os;
mod pieces;
mod refusals;
mod sim;
mod vectors;
mod whole;
