//! Gathers that wait for ranks: counted arrivals, without the ranks' names on the way.

use std::collections::{BTreeMap, VecDeque};

/// Key of gathers: generation and name.
type Key = (u64, String);

/// Incomplete gathers. Gathers of one name complete in the order in which they began.
#[derive(Debug)]
pub(super) struct Gathers {
    world_size: usize,
    pending: BTreeMap<Key, VecDeque<Gather>>,
    /// Bytes of the values that wait.
    bytes: usize,
}

#[derive(Debug)]
struct Gather {
    values: Vec<Option<Vec<u8>>>,
    arrived: usize,
}

impl Gather {
    fn bytes(&self) -> usize {
        size_of_val(&self.values[..]) + self.values.iter().flatten().map(Vec::len).sum::<usize>()
    }
}

impl Gathers {
    pub(super) fn new(world_size: usize) -> Self {
        Gathers { world_size, pending: BTreeMap::new(), bytes: 0 }
    }

    /// Memory of the gathers that wait, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds a rank's value to the first gather of this name that lacks it. Returns all values once they are complete.
    pub(super) fn arrive(&mut self, key: &Key, rank: usize, value: Vec<u8>) -> Option<Vec<Vec<u8>>> {
        let queue = self.pending.entry(key.clone()).or_default();
        let at = queue.iter().position(|gather| gather.values[rank].is_none()).unwrap_or(queue.len());
        if at == queue.len() {
            queue.push_back(Gather { values: vec![None; self.world_size], arrived: 0 });
            self.bytes += queue[at].bytes();
        }
        let gather = &mut queue[at];
        self.bytes += value.len();
        gather.values[rank] = Some(value);
        gather.arrived += 1;
        // A rank's values go to the gathers in order, so the first gather completes first.
        if gather.arrived < self.world_size {
            return None;
        }
        let complete = self.remove(key, at)?;
        Some(complete.values.into_iter().flatten().collect())
    }

    /// Returns the missing ranks of the first gather of this name that `rank` has entered.
    pub(super) fn missing(&self, key: &Key, rank: usize) -> Option<Vec<usize>> {
        let gather = self.pending.get(key)?.iter().find(|gather| gather.values[rank].is_some())?;
        Some((0..self.world_size).filter(|&rank| gather.values[rank].is_none()).collect())
    }

    /// Returns true if a gather of this name lacks `rank`, which has left, when another rank enters it.
    pub(super) fn lacks(&self, key: &Key, rank: usize, newcomer: usize) -> bool {
        let mut queue = self.pending.get(key).into_iter().flatten();
        let next = queue.find(|gather| gather.values[newcomer].is_none());
        next.is_none_or(|gather| gather.values[rank].is_none())
    }

    /// Drops the gathers that lack `rank`, and returns the ranks that wait for each.
    pub(super) fn depart(&mut self, rank: usize) -> Vec<(Key, Vec<usize>)> {
        let mut dropped = Vec::new();
        for (key, queue) in &mut self.pending {
            let hopeless: Vec<Gather> = {
                let (kept, hopeless): (VecDeque<_>, VecDeque<_>) =
                    std::mem::take(queue).into_iter().partition(|gather| gather.values[rank].is_some());
                *queue = kept;
                hopeless.into()
            };
            for gather in hopeless {
                self.bytes -= gather.bytes();
                let waiting = (0..self.world_size).filter(|&rank| gather.values[rank].is_some()).collect();
                dropped.push((key.clone(), waiting));
            }
        }
        self.pending.retain(|_, queue| !queue.is_empty());
        dropped
    }

    /// Drops the gathers of generations below `oldest`.
    pub(super) fn retire(&mut self, oldest: u64) {
        let kept = self.pending.split_off(&(oldest, String::new()));
        let dropped = std::mem::replace(&mut self.pending, kept);
        self.bytes -= dropped.values().flatten().map(Gather::bytes).sum::<usize>();
    }

    fn remove(&mut self, key: &Key, at: usize) -> Option<Gather> {
        let queue = self.pending.get_mut(key)?;
        let gather = queue.remove(at)?;
        if queue.is_empty() {
            self.pending.remove(key);
        }
        self.bytes -= gather.bytes();
        Some(gather)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(generation: u64) -> Key {
        (generation, "name".to_owned())
    }

    #[test]
    fn a_fast_rank_s_later_values_wait_for_the_others() {
        let mut gathers = Gathers::new(2);
        for value in 1..4 {
            assert_eq!(gathers.arrive(&key(0), 0, vec![value]), None);
        }
        for value in 1..4 {
            assert_eq!(gathers.missing(&key(0), 0), Some(vec![1]));
            let complete = gathers.arrive(&key(0), 1, vec![10 * value]);
            assert_eq!(complete, Some(vec![vec![value], vec![10 * value]]));
        }
        assert_eq!((gathers.bytes(), gathers.pending.len()), (0, 0));
        assert_eq!(gathers.missing(&key(0), 0), None);
    }

    #[test]
    fn gathers_without_a_departed_rank_end_and_complete_later_ones_do_not_wait() {
        let mut gathers = Gathers::new(3);
        // Rank 2 enters one gather and leaves; rank 0 has entered two.
        for (rank, value) in [(0, 1), (2, 2), (0, 3)] {
            assert_eq!(gathers.arrive(&key(0), rank, vec![value]), None);
        }
        assert_eq!(gathers.depart(2), [(key(0), vec![0])]);
        assert!(
            !gathers.lacks(&key(0), 2, 1) && gathers.lacks(&key(0), 2, 0) && gathers.lacks(&key(1), 2, 0)
        );
        assert_eq!(gathers.arrive(&key(0), 1, vec![4]), Some(vec![vec![1], vec![4], vec![2]]));
        assert_eq!(gathers.bytes(), 0);
    }

    #[test]
    fn old_generations_are_dropped_with_their_bytes() {
        let mut gathers = Gathers::new(2);
        for generation in 0..3 {
            assert_eq!(gathers.arrive(&key(generation), 0, vec![0; 100]), None);
        }
        let all = gathers.bytes();
        gathers.retire(2);
        assert_eq!(gathers.bytes(), all / 3);
        assert_eq!(gathers.missing(&key(1), 0), None);
        assert_eq!(gathers.missing(&key(2), 0), Some(vec![1]));
    }
}
