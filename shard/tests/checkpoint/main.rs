//! Checkpoints: pieces, the manifest, and a disk that forgets.

#![allow(clippy::unwrap_used, reason = "tests say what is wrong by failing")]

mod altered;
mod background;
mod beside;
mod bytes;
#[path = "../common/mod.rs"]
mod common;
mod consolidate;
mod continued;
mod corpus;
mod counted;
mod crash;
mod crashes;
mod damage;
mod disks;
mod edits;
mod failures;
mod faulty;
mod fuzzed;
mod gate;
mod holdings;
mod killed;
mod layouts;
mod lbfgs;
mod memory;
mod os;
mod pieces;
mod problem;
mod pytorch;
mod pytorch_refusals;
mod refusals;
mod reshards;
mod sim;
mod vectors;
mod whole;
