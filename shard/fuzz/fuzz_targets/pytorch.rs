//! Imports bytes as a file with PyTorch's names.

#![no_main]

use meshstep_shard_fuzzed as fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::optimizers::pytorch(input));
