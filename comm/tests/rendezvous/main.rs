//! Processes that find each other: from which variables, over which bytes, and past whom.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod channel;
mod common;
mod disagreement;
mod environment;
mod meeting;
mod processes;
mod proxy;
mod strangers;
mod wire;
