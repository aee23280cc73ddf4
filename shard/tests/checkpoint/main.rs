//! Checkpoints: pieces, the manifest, and a disk that forgets.

#![allow(clippy::unwrap_used, reason = "tests say what is wrong by failing")]

mod background;
#[path = "../common/mod.rs"]
mod common;
mod crash;
mod damage;
mod gate;
mod holdings;
mod layouts;
mod os;
mod pieces;
mod sim;
mod whole;
