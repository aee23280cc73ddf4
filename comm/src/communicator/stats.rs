//! Counts of a rank's operations and of the bytes that a ring algorithm would send for them.

use crate::Action;
use std::ops::Range;

/// Kind of operation in [`Stats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `all_reduce`: 2 (S - own chunk) bytes, where S is the size of the buffer.
    AllReduce,
    /// `reduce_scatter`: S - own chunk.
    ReduceScatter,
    /// `all_gather`: S - own chunk.
    AllGather,
    /// `all_to_all`: S - own chunk.
    AllToAll,
    /// `broadcast`: S, except for the last rank of the ring that begins at the root.
    Broadcast,
    /// `send`: S.
    Send,
    /// `recv`: nothing.
    Recv,
    /// `barrier`: nothing.
    Barrier,
    /// `split`: nothing.
    Split,
}

impl Kind {
    /// All kinds, in the order of reports.
    pub const ALL: [Kind; 9] = [
        Kind::AllReduce,
        Kind::ReduceScatter,
        Kind::AllGather,
        Kind::AllToAll,
        Kind::Broadcast,
        Kind::Send,
        Kind::Recv,
        Kind::Barrier,
        Kind::Split,
    ];
}

/// Operations and bytes of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Operations that succeeded.
    pub operations: u64,
    /// Bytes sent by this rank.
    pub bytes: u64,
}

/// Counts of one rank on one communicator. Only successful operations count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    by_kind: [Traffic; Kind::ALL.len()],
}

impl Stats {
    /// Operations and bytes of one kind.
    pub fn of(&self, kind: Kind) -> Traffic {
        self.by_kind[kind as usize]
    }

    /// Operations and bytes of all kinds.
    pub fn total(&self) -> Traffic {
        let add = |a: Traffic, b: &Traffic| Traffic {
            operations: a.operations + b.operations,
            bytes: a.bytes + b.bytes,
        };
        self.by_kind.iter().fold(Traffic::default(), add)
    }

    /// Counts one operation, which a backend calls after its success. The buffer has `len` elements of `size` bytes. An
    /// [`Action::ReduceAndGather`] counts as the two operations that it replaces.
    pub fn count(&mut self, action: Action, rank: usize, world_size: usize, len: usize, size: usize) {
        if let Action::ReduceAndGather(reduction) = action {
            self.count(Action::ReduceScatter(reduction), rank, world_size, len, size);
            return self.count(Action::AllGather, rank, world_size, len, size);
        }
        let traffic = &mut self.by_kind[kind(action) as usize];
        traffic.operations += 1;
        traffic.bytes += (sent(action, rank, world_size, len) * size) as u64;
    }
}

/// Returns part `index` of `len` elements cut into `parts`; lengths differ by at most one, the longer parts come first.
pub(crate) fn chunk(len: usize, parts: usize, index: usize) -> Range<usize> {
    let (short, longer) = (len / parts, len % parts);
    let start = index * short + index.min(longer);
    start..start + short + usize::from(index < longer)
}

fn kind(action: Action) -> Kind {
    match action {
        Action::AllReduce(_) => Kind::AllReduce,
        Action::ReduceScatter(_) | Action::ReduceAndGather(_) => Kind::ReduceScatter,
        Action::AllGather => Kind::AllGather,
        Action::AllToAll => Kind::AllToAll,
        Action::Broadcast { .. } => Kind::Broadcast,
        Action::Send { .. } => Kind::Send,
        Action::Recv { .. } => Kind::Recv,
        Action::Barrier => Kind::Barrier,
        Action::Split { .. } => Kind::Split,
    }
}

fn sent(action: Action, rank: usize, world_size: usize, len: usize) -> usize {
    let others = len - chunk(len, world_size, rank).len();
    match action {
        Action::AllReduce(_) | Action::ReduceAndGather(_) => 2 * others,
        Action::ReduceScatter(_) | Action::AllGather | Action::AllToAll => others,
        Action::Broadcast { root } if (rank + 1) % world_size == root => 0,
        Action::Broadcast { .. } | Action::Send { .. } => len,
        Action::Recv { .. } | Action::Barrier | Action::Split { .. } => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reduction::Sum;
    use proptest::prelude::*;

    fn total(action: Action, n: usize, len: usize) -> usize {
        (0..n).map(|rank| sent(action, rank, n, len)).sum()
    }

    proptest! {
        #[test]
        fn chunks_cover_and_differ_by_one(len in 0usize..10_000, n in 1usize..40) {
            let mut end = 0;
            for i in 0..n {
                let range = chunk(len, n, i);
                prop_assert_eq!(range.start, end);
                prop_assert!(range.len() == len / n || range.len() == len / n + 1);
                end = range.end;
            }
            prop_assert_eq!(end, len);
        }

        #[test]
        fn the_ranks_together_send_what_a_ring_sends(len in 0usize..1000, n in 1usize..12, root in 0usize..12) {
            prop_assert_eq!(total(Action::AllReduce(Sum), n, len), 2 * (n - 1) * len);
            let even = len * n;
            prop_assert_eq!(total(Action::ReduceScatter(Sum), n, even), (n - 1) * even);
            prop_assert_eq!(sent(Action::AllGather, root % n, n, even), (n - 1) * even / n);
            prop_assert_eq!(sent(Action::AllToAll, root % n, n, even), (n - 1) * even / n);
            prop_assert_eq!(total(Action::Broadcast { root: root % n }, n, len), (n - 1) * len);
        }
    }

    #[test]
    fn kinds_are_counted_apart() {
        let mut stats = Stats::default();
        stats.count(Action::AllReduce(Sum), 0, 4, 10, 4);
        stats.count(Action::Send { to: 1 }, 0, 4, 10, 2);
        stats.count(Action::Barrier, 0, 4, 0, 4);
        assert_eq!(stats.of(Kind::AllReduce), Traffic { operations: 1, bytes: 2 * 7 * 4 });
        assert_eq!(stats.of(Kind::Send), Traffic { operations: 1, bytes: 20 });
        assert_eq!(stats.of(Kind::Recv), Traffic::default());
        assert_eq!(stats.total(), Traffic { operations: 3, bytes: 76 });
    }
}
