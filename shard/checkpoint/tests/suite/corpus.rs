//! Replay of the fuzz targets' corpus.

use crate::allocator::most;
use meshstep_checkpoint_cases::fuzzed::{self, optimizers};
use std::path::Path;

fn replay(target: &str, body: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut inputs: Vec<_> = dir.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(inputs.len() >= 20, "{dir:?} has {} inputs", inputs.len());
    for path in inputs {
        let caught = std::panic::catch_unwind(|| body(&std::fs::read(&path).unwrap()));
        assert!(caught.is_ok(), "{path:?} is a finding");
    }
}

#[test]
fn manifests() {
    replay("manifest", fuzzed::manifest);
}

#[test]
fn latests() {
    replay("latest", fuzzed::latest);
}

#[test]
fn shards() {
    replay("shard", fuzzed::shard);
}

/// A window is 1 MiB; files have a few hundred bytes.
const MOST: usize = 8 << 20;

#[test]
fn files_of_pytorch() {
    replay("pytorch", |input| assert!(most(|| optimizers::pytorch(input)).1 < MOST));
}

#[test]
fn bytes_of_an_optimizer() {
    replay("bytes", |input| assert!(most(|| optimizers::bytes(input)).1 < MOST));
}
