//! Reads bytes as LATEST.

#![no_main]

use meshstep_shard_fuzzed as fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::latest(input));
