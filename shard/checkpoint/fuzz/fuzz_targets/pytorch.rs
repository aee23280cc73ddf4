//! Imports bytes as a file with PyTorch's names.

#![no_main]

use meshstep_checkpoint_cases::fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::optimizers::pytorch(input));
