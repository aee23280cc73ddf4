//! Checkpoints: pieces, the manifest, and a disk that forgets.

#![allow(clippy::unwrap_used, reason = "tests say what is wrong by failing")]

mod crash;
mod damage;
mod holdings;
mod os;
mod pieces;
mod sim;
