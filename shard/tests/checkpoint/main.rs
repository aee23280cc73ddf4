//! Checkpoints: pieces, the manifest, and a disk that forgets.

#![allow(clippy::unwrap_used, reason = "tests say what is wrong by failing")]

mod corpus;
mod counted;
mod crash;
mod damage;
mod edits;
mod fuzzed;
mod holdings;
mod os;
mod pieces;
mod sim;
mod vectors;
