//! Loads bytes as the output of `serialize`.

#![no_main]

use meshstep_checkpoint_cases::fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::optimizers::bytes(input));
