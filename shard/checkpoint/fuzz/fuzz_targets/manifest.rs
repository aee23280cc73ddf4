//! Parses bytes as a manifest.

#![no_main]

use meshstep_checkpoint_cases::fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::manifest(input));
