//! Loads bytes as the output of `serialize`.

#![no_main]

use meshstep_shard_fuzzed as fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::optimizers::bytes(input));
