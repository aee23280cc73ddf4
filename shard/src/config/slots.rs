//! Slots: the micro-batches of a step in an order that does not depend on the number of ranks.

use crate::error::SlotError;
use std::ops::Range;
use std::sync::Arc;

/// Maximum number of slots: their counts are exact in f32.
const MOST: usize = 1 << 24;

/// Slots of a step, divided among the ranks in runs of consecutive slots, in the order of the ranks.
///
/// The global batch of a step is a fixed number of micro-batches, its slots. Their gradients are added in one binary tree over the slots.
/// Nodes are rounded to the gradients' type (f32 or f64): node `i` of level `l` is the sum of nodes `2i` and `2i + 1` of level
/// `l - 1`, of which a missing one is left out. The tree does not depend on the number of ranks, the stage, the buckets or the runs, so
/// neither do the bits of the parameters, as long as each slot's own gradient has the same bits wherever it is computed: the same shapes,
/// library and number of threads.
///
/// ```
/// use meshstep_shard::SlotRuns;
///
/// let runs = SlotRuns::even(8, 3)?;
/// assert_eq!([0, 1, 2].map(|rank| runs.run(rank)), [0..3, 3..6, 6..8]);
/// assert_eq!(SlotRuns::new(&[1, 5, 2])?.run(1), 1..6); // a rank that is faster than the others
/// assert!(SlotRuns::even(2, 3).is_err());
/// # Ok::<(), meshstep_shard::SlotError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SlotRuns {
    /// First slot of each rank, and the number of slots.
    borders: Arc<[usize]>,
}

impl SlotRuns {
    /// Divides `slots` among `ranks` ranks; the first ones have one more if they cannot have equally many.
    pub fn even(slots: usize, ranks: usize) -> Result<Self, SlotError> {
        if ranks == 0 || slots < ranks {
            return Err(SlotError::TooFew { slots, ranks });
        }
        let len = |rank| slots / ranks + usize::from(rank < slots % ranks);
        SlotRuns::new(&(0..ranks).map(len).collect::<Vec<_>>())
    }

    /// Divides as many slots as these runs have together: `lens[rank]` for each rank.
    pub fn new(lens: &[usize]) -> Result<Self, SlotError> {
        let ends = lens.iter().scan(0usize, |end, len| {
            *end = end.saturating_add(*len);
            Some(*end)
        });
        let borders: Arc<[usize]> = std::iter::once(0).chain(ends).collect();
        let (slots, ranks) = (borders[lens.len()], lens.len());
        match () {
            () if lens.is_empty() || lens.contains(&0) => Err(SlotError::TooFew { slots, ranks }),
            () if slots > MOST => Err(SlotError::TooMany { slots, max: MOST }),
            () => Ok(SlotRuns { borders }),
        }
    }

    /// Returns the number of slots of a step.
    pub fn total(&self) -> usize {
        self.borders[self.ranks()]
    }

    /// Returns the number of ranks that divide them.
    pub fn ranks(&self) -> usize {
        self.borders.len() - 1
    }

    /// Returns the slots of a rank: it computes them in this order, each as one micro-batch.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn run(&self, rank: usize) -> Range<usize> {
        self.borders[rank]..self.borders[rank + 1]
    }

    /// Returns the length of the longest run. At stage 3 units are gathered by all ranks together: a rank with a shorter run gathers them as
    /// often as the others, before it finishes its last micro-batch.
    pub fn longest(&self) -> usize {
        (0..self.ranks()).map(|rank| self.run(rank).len()).max().unwrap_or(0)
    }

    /// Returns true if each rank has one slot.
    pub(crate) fn are_single(&self) -> bool {
        self.total() == self.ranks()
    }
}
