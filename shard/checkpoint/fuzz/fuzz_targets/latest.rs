//! Reads bytes as LATEST.

#![no_main]

use meshstep_checkpoint_cases::fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::latest(input));
