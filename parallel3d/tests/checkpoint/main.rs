//! What is saved on one mesh is loaded onto another.

#![allow(clippy::unwrap_used, reason = "tests say what is wrong by failing")]

#[path = "../common/mod.rs"]
mod common;
mod meshes;
