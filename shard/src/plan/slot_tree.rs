//! Binary tree over the slots of a step: the sums that each rank makes, and those that follow once they have travelled. Arithmetic only.

use crate::config::options::{Clip, Combine, Missing, Options};
use crate::config::slots::SlotRuns;
use crate::config::stage::Stage;
use crate::error::SlotError;
use crate::plan::bucket::BucketPlan;
use crate::plan::layout_plan::Sizes;
use meshstep_tensor::DType;
use std::ops::Range;

/// More than the partial sums of any run of at most 2^24 slots: two of each level.
pub(crate) const MAX_ROUNDS: usize = 50;

/// Node of the tree: slots `index << level .. (index + 1) << level`, all of them summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) level: u32,
    pub(crate) index: usize,
}

impl Node {
    pub(crate) fn leaf(slot: usize) -> Node {
        Node { level: 0, index: slot }
    }

    /// Returns the sum of a node and the one after it, if a node of the next level is their sum.
    pub(crate) fn join(self, next: Node) -> Option<Node> {
        let siblings =
            self.level == next.level && self.index.is_multiple_of(2) && next.index == self.index + 1;
        siblings.then_some(Node { level: self.level + 1, index: self.index / 2 })
    }
}

/// Place of a partial sum after the exchange: a rank's chunk of one of its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartialPlace {
    pub(crate) round: usize,
    pub(crate) rank: usize,
}

/// An addition of two partial sums; the sum has the place of the left one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Addition {
    pub(crate) left: PartialPlace,
    pub(crate) right: PartialPlace,
}

/// Sums over slots among ranks that reduce gradients together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotTree {
    runs: SlotRuns,
    /// Partial sums that a rank sends, at most: all ranks take part in as many exchanges.
    rounds: usize,
    additions: Vec<Addition>,
    /// True if a slot is added to the one before it where that lies: its gradients have no weight.
    in_place: bool,
    /// True if the tree over the ranks' sums is that of [`Reduction::Pairwise`](meshstep_comm::Reduction::Pairwise).
    pairwise: bool,
}

impl SlotTree {
    pub(crate) fn new(runs: SlotRuns, combine: Combine) -> Self {
        let partials: Vec<Vec<Node>> = (0..runs.ranks()).map(|rank| partials(runs.run(rank))).collect();
        let rounds = partials.iter().map(Vec::len).max().unwrap_or(0);
        let first = runs.run(0).len();
        let pairwise = first.is_power_of_two() && (0..runs.ranks()).all(|rank| runs.run(rank).len() == first);
        let in_place = combine != Combine::Weighted;
        SlotTree { additions: additions(&partials), runs, rounds, in_place, pairwise }
    }

    /// Returns true if a slot is added to the one before it where that lies.
    pub(crate) fn adds_in_place(&self) -> bool {
        self.in_place
    }

    /// Returns true if a pairwise reduction over the ranks gives the tree's sums.
    pub(crate) fn is_pairwise(&self) -> bool {
        self.pairwise
    }

    pub(crate) fn runs(&self) -> &SlotRuns {
        &self.runs
    }

    /// Returns the number of exchanges of a bucket.
    pub(crate) fn rounds(&self) -> usize {
        self.rounds
    }

    /// Returns the additions that follow the exchanges, in order; the last sum has place 0 of rank 0.
    pub(crate) fn additions(&self) -> &[Addition] {
        &self.additions
    }

    /// Returns the number of vectors that a rank needs for each bucket: sums that it keeps and the slot that is added, or as many as travel.
    pub(crate) fn vectors(&self, rank: usize) -> usize {
        let mut most = self.rounds;
        fold(self.runs.run(rank), |kept, slot| {
            // The vector of the slot before is counted with it.
            let joins = self.in_place && slot % 2 == 1 && slot > self.runs.run(rank).start;
            most = most.max(kept + usize::from(!joins));
        });
        most
    }
}

/// Adds slots one after another and joins complete nodes; calls `before` with the number of sums before each slot, and the slot.
fn fold(run: Range<usize>, mut before: impl FnMut(usize, usize)) -> Vec<Node> {
    let mut sums: Vec<Node> = Vec::new();
    for slot in run {
        before(sums.len(), slot);
        let mut node = Node::leaf(slot);
        while let Some(joined) = sums.last().and_then(|sum| sum.join(node)) {
            sums.pop();
            node = joined;
        }
        sums.push(node);
    }
    sums
}

/// Returns the partial sums of a run.
fn partials(run: Range<usize>) -> Vec<Node> {
    fold(run, |_, _| {})
}

/// Returns the additions of all ranks' partial sums, in the order of their slots.
fn additions(partials: &[Vec<Node>]) -> Vec<Addition> {
    let (mut sums, mut additions): (Vec<(Node, PartialPlace)>, Vec<Addition>) = (Vec::new(), Vec::new());
    for (rank, partials) in partials.iter().enumerate() {
        for (round, &partial) in partials.iter().enumerate() {
            let (mut node, mut place) = (partial, PartialPlace { round, rank });
            while let Some((left, joined)) =
                sums.last().and_then(|&(sum, left)| Some((left, sum.join(node)?)))
            {
                sums.pop();
                additions.push(Addition { left, right: place });
                (node, place) = (joined, left);
            }
            sums.push((node, place));
        }
    }
    // The last nodes of a tree that is not full: each is added to the one before it.
    let mut right = sums.pop();
    while let (Some((_, place)), Some((node, left))) = (right, sums.pop()) {
        additions.push(Addition { left, right: place });
        right = Some((node, left));
    }
    additions
}

/// Returns the tree of a part's gradients, or why they have none.
pub(crate) fn of(
    sizes: &Sizes,
    buckets: &[BucketPlan],
    options: &Options,
) -> Result<Option<SlotTree>, SlotError> {
    let Some(runs) = &options.slots else { return Ok(None) };
    let narrow =
        buckets.iter().map(|bucket| bucket.grads).find(|dtype| !matches!(dtype, DType::F32 | DType::F64));
    let dependent = |what, works| Err(SlotError::Dependent { what, works });
    match () {
        () if runs.ranks() != sizes.shards => {
            Err(SlotError::Ranks { runs: runs.ranks(), ranks: sizes.shards })
        }
        () if !sizes.extra_reductions.is_empty() => dependent(
            "gradients that are reduced twice, over shards and over replicas or parts of a model",
            "one group of ranks",
        ),
        () if options.clip == Clip::BeforeReduce => dependent("Clip::BeforeReduce", "Clip::AfterReduce"),
        () if options.reduce_in_step => Err(SlotError::InStep),
        () if options.missing == Missing::AllOrNone => {
            dependent("Missing::AllOrNone", "Missing::SkipIfMissingEverywhere")
        }
        () if matches!(options.stage, Stage::WholeParams(_)) => {
            Err(SlotError::Stage { stage: options.stage })
        }
        () => match narrow {
            Some(dtype) => Err(SlotError::Narrow { dtype }),
            None => Ok(Some(SlotTree::new(runs.clone(), options.combine))),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition: the sum of the slots that a node has.
    fn node(values: &[f32], level: u32, index: usize) -> Option<f32> {
        let (first, slots) = (index << level, values.len());
        match level {
            _ if first >= slots => None,
            0 => Some(values[first]),
            _ => {
                let left = node(values, level - 1, 2 * index)?;
                Some(node(values, level - 1, 2 * index + 1).map_or(left, |right| left + right))
            }
        }
    }

    fn root(values: &[f32]) -> f32 {
        node(values, values.len().next_power_of_two().ilog2(), 0).unwrap()
    }

    /// Sums as ranks do: each its run, then all partial sums by the additions.
    fn by_ranks(values: &[f32], tree: &SlotTree) -> f32 {
        let mut rows: Vec<Vec<f32>> = Vec::new();
        for rank in 0..tree.runs().ranks() {
            let of = |node: &Node| {
                let slots = node.index << node.level..(node.index + 1) << node.level;
                root(&values[slots])
            };
            let partials = partials(tree.runs().run(rank));
            assert!(partials.len() <= tree.rounds() && tree.rounds() <= tree.vectors(rank));
            rows.push(partials.iter().map(of).collect());
        }
        for Addition { left, right } in tree.additions() {
            rows[left.rank][left.round] += rows[right.rank][right.round];
        }
        rows[0][0]
    }

    proptest! {
        #[test]
        fn every_division_gives_the_trees_sum(
            lens in prop::collection::vec(1usize..12, 1..10),
            seed in any::<u32>(),
        ) {
            let runs = SlotRuns::new(&lens).unwrap();
            let value = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) ^ seed) as f32 / 1e5 - 2e4;
            let values: Vec<f32> = (0..runs.total()).map(value).collect();
            let tree = SlotTree::new(runs.clone(), Combine::Weighted);
            prop_assert_eq!(by_ranks(&values, &tree).to_bits(), root(&values).to_bits());
            let most = |rank: usize| 2 * (runs.run(rank).len() as f64).log2().ceil() as usize + 1;
            prop_assert!((0..lens.len()).all(|rank| tree.vectors(rank) <= most(rank).max(tree.rounds())));
        }
    }

    #[test]
    fn equal_powers_of_two_travel_once() {
        for (slots, ranks) in [(8, 1), (8, 2), (8, 4), (8, 8), (64, 4)] {
            let tree = SlotTree::new(SlotRuns::even(slots, ranks).unwrap(), Combine::Weighted);
            let each = slots / ranks;
            assert_eq!((tree.rounds(), tree.additions().len(), tree.is_pairwise()), (1, ranks - 1, true));
            let in_place = SlotTree::new(tree.runs().clone(), Combine::Mean);
            assert_eq!(in_place.vectors(0), (each.ilog2() as usize).max(1));
            assert!((0..ranks).all(|rank| tree.vectors(rank) == each.ilog2() as usize + 1));
        }
        let tree = SlotTree::new(SlotRuns::even(8, 3).unwrap(), Combine::Weighted);
        assert!(!tree.is_pairwise());
        assert_eq!((tree.rounds(), [0, 1, 2].map(|rank| tree.vectors(rank))), (2, [2, 3, 2]));
    }
}
