//! Every misuse and failure, on 2 and 4 ranks: the right typed error on every rank, and nobody waits for ever.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;
mod deadlines;
mod departures;
mod misuse;
