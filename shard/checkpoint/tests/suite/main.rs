//! All tests of the crate's public interface, one module per subject.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    unreachable_pub,
    reason = "tests fail by panicking, say what they skip, and share freely"
)]

mod absurd;
mod allocator;
mod alone;
mod altered;
mod background;
mod beside;
mod bytes;
mod consolidate;
mod corpus;
mod crash;
mod crashes;
mod cross_shard;
#[cfg(feature = "cuda")]
mod cuda;
mod damage;
mod disks;
mod edits;
mod evaluation;
mod examples;
mod failures;
mod faulty;
mod gate;
mod groups;
mod holdings;
mod hooked;
mod jobs;
mod killed;
mod layouts;
mod lbfgs;
mod manifest_memory;
mod manifest_ranks;
mod matrices;
mod memory;
mod one_file;
mod os;
mod pieces;
mod progress;
mod pytorch;
mod pytorch_refusals;
mod refusals;
mod removed;
mod reshards;
mod rivals;
mod texts;
mod tied;
mod unsupported;
mod vectors;
mod whole;
mod windows;
use meshstep_shard_cases as common;
