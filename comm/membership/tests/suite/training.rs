//! Model of training for the simulation: three parts of state that drift apart with each local step, and are averaged every 4, 12
//! and 24 steps. A hash of all contributions represents a mean, so that a missing, extra or repeated contribution shows.

use std::collections::BTreeMap;

pub(crate) const PERIODS: [u64; 3] = [4, 12, 24];

/// Mixes the bits of two numbers.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let x = (a.rotate_left(23) ^ b).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ x >> 32
}

/// State of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Model {
    pub(crate) parts: [u64; 3],
    pub(crate) step: u64,
    /// Hash of all results applied, in order: the committed state.
    pub(crate) committed: u64,
}

impl Model {
    pub(crate) fn new() -> Self {
        Model { parts: [1, 2, 3], step: 0, committed: 0 }
    }

    pub(crate) fn local_step(&mut self, id: u64) {
        for part in &mut self.parts {
            *part = mix(mix(*part, id + 1), self.step);
        }
        self.step += 1;
    }

    /// Returns the next step with an exchange.
    pub(crate) fn next_due(&self) -> u64 {
        (self.step / PERIODS[0] + 1) * PERIODS[0]
    }

    /// Returns the new value of each part that is due.
    pub(crate) fn exchanged(&self, contributions: &BTreeMap<u64, Model>) -> [Option<u64>; 3] {
        let due = |period: u64| self.step.is_multiple_of(period);
        let mean =
            |i: usize| contributions.iter().fold(7, |sum, (id, model)| mix(mix(sum, *id), model.parts[i]));
        [0, 1, 2].map(|i| due(PERIODS[i]).then(|| mean(i)))
    }

    pub(crate) fn apply(&mut self, result: [Option<u64>; 3]) {
        for (part, value) in self.parts.iter_mut().zip(result) {
            *part = value.unwrap_or(*part);
            self.committed = mix(self.committed, value.unwrap_or_default());
        }
        self.committed = mix(self.committed, self.step);
    }
}
