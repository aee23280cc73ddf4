//! Bytes as what `serialize` made.

#![no_main]

#[allow(dead_code, reason = "each target has a body of its own")]
#[path = "../../tests/checkpoint/fuzzed/mod.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::optimizers::bytes(input));
