//! Partition of an operation's elements into portions, which the ranks draw one by one. Arithmetic only.

use crate::Action;
use crate::communicator::stats::chunk;
use std::ops::Range;

/// Elements of a portion: few enough for load balance, enough to hide the memory latency at its beginning.
const PORTION: usize = 64 << 10;

/// An operation on buffers of `len` elements as seen by rank `rank` of `world_size`; all ranks cut the elements alike.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    action: Action,
    pub(super) rank: usize,
    world_size: usize,
    len: usize,
}

/// Part of the operation that a portion lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CutPart {
    /// Chunk of this index, in every buffer.
    Chunk(usize),
    /// Chunk `b` of rank `a`'s buffer and chunk `a` of rank `b`'s, which are exchanged; `a < b`.
    Swap { a: usize, b: usize },
    /// Both buffers of a pair.
    Pair { from: usize, to: usize },
}

impl Cut {
    pub(super) fn new(action: Action, rank: usize, world_size: usize, len: usize) -> Self {
        Cut { action, rank, world_size, len }
    }

    /// Returns portion `number`, which may be empty; `None` after the last.
    pub(super) fn portion(&self, number: usize) -> Option<(CutPart, Range<usize>)> {
        let per_part = self.chunk(0).len().max(1).div_ceil(PORTION);
        let (part, number) = (number / per_part, number % per_part);
        let (part, whole) = match self.action {
            Action::Barrier | Action::Split { .. } => return None,
            Action::Send { to } if part == 0 => (CutPart::Pair { from: self.rank, to }, self.chunk(0)),
            Action::Recv { from } if part == 0 => (CutPart::Pair { from, to: self.rank }, self.chunk(0)),
            Action::Send { .. } | Action::Recv { .. } => return None,
            Action::AllToAll => (pair(part, self.world_size)?, 0..self.chunk(0).len()),
            _ if part < self.world_size => (CutPart::Chunk(part), self.chunk(part)),
            _ => return None,
        };
        let start = whole.end.min(whole.start + number * PORTION);
        Some((part, start..whole.end.min(start + PORTION)))
    }

    /// Returns the range of chunk `index`; the buffers of a pair are one chunk.
    pub(super) fn chunk(&self, index: usize) -> Range<usize> {
        let chunks = if self.action.peer().is_some() { 1 } else { self.world_size };
        chunk(self.len, chunks, index)
    }

    /// Returns true if elements `range` of rank `of`'s buffer belong to the portion `portion` of `part`. Inlined because it is
    /// checked for every reduced block, where a call would be a tenth of the work.
    #[inline(always)]
    pub(super) fn holds(
        &self,
        part: CutPart,
        portion: &Range<usize>,
        of: usize,
        range: &Range<usize>,
    ) -> bool {
        let offset = match part {
            CutPart::Chunk(_) => 0,
            CutPart::Pair { from, to } if of == from || of == to => 0,
            CutPart::Swap { a, b } if of == a => self.chunk(b).start,
            CutPart::Swap { a, b } if of == b => self.chunk(a).start,
            _ => return false,
        };
        offset + portion.start <= range.start && range.end <= offset + portion.end
    }
}

/// Returns the `index`th pair of two of `n` ranks.
fn pair(index: usize, n: usize) -> Option<CutPart> {
    let mut before = 0;
    for b in 1..n {
        if index < before + b {
            return Some(CutPart::Swap { a: index - before, b });
        }
        before += b;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reduction::Sum;
    use meshstep_cases::{long, stride};
    use proptest::prelude::*;

    /// Returns the elements around each end of a chunk or a portion, and some of the others; all elements in a long run.
    fn elements(cut: &Cut) -> Vec<usize> {
        if long() {
            return (0..cut.len).collect();
        }
        let chunks = (0..cut.world_size).map(|index| cut.chunk(index));
        let ends = chunks.flat_map(|chunk| chunk.clone().step_by(PORTION).chain([chunk.end]));
        let near = ends.flat_map(|end| end.saturating_sub(2)..cut.len.min(end + 2));
        let mut elements: Vec<usize> = near.chain((0..cut.len).step_by(stride(29))).collect();
        elements.sort();
        elements.dedup();
        elements
    }

    /// Returns for each buffer how many portions hold each of these elements.
    fn holders(cut: &Cut) -> Vec<Vec<(usize, usize)>> {
        let mut counts = vec![elements(cut).into_iter().map(|i| (i, 0)).collect::<Vec<_>>(); cut.world_size];
        for (part, range) in (0..).map_while(|number| cut.portion(number)) {
            for (of, counts) in counts.iter_mut().enumerate() {
                for (i, count) in counts {
                    *count += usize::from(cut.holds(part, &range, of, &(*i..*i + 1)));
                }
            }
        }
        counts
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(meshstep_cases::cases(40, 40)))]
        #[test]
        fn each_element_is_of_exactly_one_portion(n in 1usize..5, len in 0..3 * PORTION) {
            for action in [Action::AllReduce(Sum), Action::Broadcast { root: 0 }] {
                let counts = holders(&Cut::new(action, 0, n, len));
                prop_assert!(counts.iter().flatten().all(|&(_, count)| count == 1));
            }
            let even = len / n * n;
            let counts = holders(&Cut::new(Action::AllToAll, 0, n, even));
            for (of, counts) in counts.iter().enumerate() {
                for &(i, count) in counts {
                    // A rank keeps its own chunk.
                    prop_assert_eq!(count, usize::from(i / (even / n) != of));
                }
            }
        }

        #[test]
        fn both_ends_of_a_pair_cut_alike(len in 0..3 * PORTION) {
            let (send, recv) = (Action::Send { to: 2 }, Action::Recv { from: 1 });
            let (send, recv) = (Cut::new(send, 1, 4, len), Cut::new(recv, 2, 4, len));
            for number in 0..8 {
                prop_assert_eq!(send.portion(number), recv.portion(number));
            }
            let counts = holders(&send);
            prop_assert!(counts[1].iter().chain(&counts[2]).all(|&(_, count)| count == 1));
            prop_assert!(counts[0].iter().chain(&counts[3]).all(|&(_, count)| count == 0));
        }
    }

    #[test]
    fn operations_without_data_have_no_portion() {
        assert_eq!(Cut::new(Action::Barrier, 0, 4, 100).portion(0), None);
    }
}
