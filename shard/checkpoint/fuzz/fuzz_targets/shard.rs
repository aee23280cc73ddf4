//! Reads bytes as a step: a manifest and safetensors files.

#![no_main]

use meshstep_checkpoint_cases::fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::shard(input));
