//! Workers that step alone and meet seldom.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod plan;
