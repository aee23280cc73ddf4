//! Ownership of ranges of a flat vector, or of whole parameters. Arithmetic only: no memory, no communication.

use crate::config::stage::Owners;
use meshstep_tensor::ALIGN;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Equal contiguous parts of a vector, padded so that every part has the same length, a multiple of 64 elements.
///
/// ```
/// use meshstep_shard::Partition;
///
/// let parts = Partition::new(1000, 4);
/// assert_eq!((parts.chunk_len(), parts.padded_len(), parts.range(3)), (256, 1024, 768..1024));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    chunk: usize,
    parts: usize,
}

impl Partition {
    /// `len` elements over `parts` parts.
    ///
    /// # Panics
    /// If `parts` is 0.
    pub fn new(len: usize, parts: usize) -> Self {
        assert!(parts > 0, "a vector is parted among at least one rank");
        Partition { chunk: len.div_ceil(parts).next_multiple_of(ALIGN), parts }
    }

    /// Returns the elements of each part.
    pub fn chunk_len(&self) -> usize {
        self.chunk
    }

    /// Returns the elements of all parts together: the vector's length and its padding.
    pub fn padded_len(&self) -> usize {
        self.chunk * self.parts
    }

    /// Returns part `i`'s range in the padded vector.
    ///
    /// # Panics
    /// If `i` is not below the number of parts.
    pub fn range(&self, i: usize) -> Range<usize> {
        assert!(i < self.parts, "part {i} of {}", self.parts);
        i * self.chunk..(i + 1) * self.chunk
    }
}

impl Owners {
    /// Returns the owner of each parameter, given the parameters' element counts.
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn assign(self, lens: &[usize], world_size: usize) -> Vec<usize> {
        self.assign_after(lens, &vec![0; world_size], 0)
    }

    /// Assigns owners if ranks own `loads` elements each already, of `count` parameters together.
    pub(crate) fn assign_after(self, lens: &[usize], loads: &[usize], count: usize) -> Vec<usize> {
        assert!(!loads.is_empty(), "parameters are owned by at least one rank");
        match self {
            Owners::RoundRobin => (count..count + lens.len()).map(|i| i % loads.len()).collect(),
            Owners::SortedGreedy => greedy(lens, loads),
        }
    }
}

fn greedy(lens: &[usize], loads: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lens.len()).collect();
    order.sort_by_key(|&i| Reverse(lens[i]));
    let mut loads: BinaryHeap<_> =
        loads.iter().enumerate().map(|(rank, &load)| Reverse((load, rank))).collect();
    let mut owners = vec![0; lens.len()];
    for i in order {
        if let Some(Reverse((load, rank))) = loads.pop() {
            owners[i] = rank;
            loads.push(Reverse((load + lens[i], rank)));
        }
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_equal_aligned_and_cover() {
        for (len, parts) in [(0, 1), (1, 4), (63, 2), (256, 4), (257, 4), (1_000_003, 7)] {
            let partition = Partition::new(len, parts);
            assert!(partition.padded_len() >= len && partition.padded_len() < len + parts * ALIGN);
            let mut next = 0;
            for i in 0..parts {
                let range = partition.range(i);
                assert_eq!((range.start, range.len() % ALIGN), (next, 0));
                next = range.end;
            }
            assert_eq!(next, partition.padded_len());
        }
    }

    #[test]
    fn greedy_levels_and_round_robin_does_not() {
        let lens = [10, 1, 10, 1, 10, 1, 10, 1];
        let load = |owners: Vec<usize>| {
            let mut loads = [0; 2];
            owners.iter().zip(lens).for_each(|(&o, l)| loads[o] += l);
            loads
        };
        assert_eq!(load(Owners::RoundRobin.assign(&lens, 2)), [40, 4]);
        assert_eq!(load(Owners::SortedGreedy.assign(&lens, 2)), [22, 22]);
        assert_eq!(Owners::SortedGreedy.assign(&[3, 3, 3], 4), [0, 1, 2]);
        assert_eq!(Owners::SortedGreedy.assign_after(&[3, 3], &[9, 0, 9], 5), [1, 1]);
        assert_eq!(Owners::RoundRobin.assign_after(&[3, 3], &[9, 0, 9], 5), [2, 0]);
    }
}
