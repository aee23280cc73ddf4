//! Tests of streams between ranks, as threads and as processes.

mod carry;
mod common;
mod fakes;
mod joining;
mod mixed;
