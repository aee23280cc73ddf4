//! Sizes of the values that ranks keep, so that the store bounds them.

use std::collections::{BTreeMap, HashMap};

/// Sizes of the values that every rank keeps, by generation and key.
#[derive(Debug, Default)]
pub(super) struct KeptSizes {
    sizes: BTreeMap<u64, HashMap<Vec<u8>, usize>>,
    bytes: usize,
}

impl KeptSizes {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Replaces the size of a value.
    pub(super) fn set(&mut self, generation: u64, key: Vec<u8>, size: usize) {
        let old = self.sizes.entry(generation).or_default().insert(key, size);
        self.bytes = self.bytes + size - old.unwrap_or(0);
    }

    /// Drops the sizes of generations below `oldest`.
    pub(super) fn retire(&mut self, oldest: u64) {
        let kept = self.sizes.split_off(&oldest);
        let dropped = std::mem::replace(&mut self.sizes, kept);
        self.bytes -= dropped.values().flat_map(HashMap::values).sum::<usize>();
    }
}
