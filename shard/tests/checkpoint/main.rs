//! Checkpoints: pieces, the manifest, and a disk that forgets.

#![allow(clippy::unwrap_used, reason = "tests say what is wrong by failing")]

mod absurd;
mod alone;
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
mod groups;
mod holdings;
mod hooked;
mod killed;
mod layouts;
mod lbfgs;
mod memory;
mod one_file;
mod os;
mod pieces;
mod problem;
mod progress;
mod pytorch;
mod pytorch_refusals;
mod refusals;
mod removed;
mod reshards;
mod sim;
mod texts;
mod tied;
mod vectors;
mod whole;
mod windows;
