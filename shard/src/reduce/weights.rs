//! Weights of micro-batches, and whether ranks that compute the same ones weigh them alike.

use crate::{Combine, DataPlace, Error, Optimizer, gather_words};
use meshstep_comm::Communicator;
use std::collections::HashMap;
use xxhash_rust::xxh3::xxh3_64_with_seed;

impl DataPlace {
    /// A word that adds up to 0 over the ranks of this place where all have weighed alike. Where they have not it is 0 in one of
    /// 2^64 cases: hashes of different weights do not make up for each other, as the weights themselves may.
    fn balance(self, weights: u64) -> u64 {
        let hash = xxh3_64_with_seed(&weights.to_le_bytes(), self.index);
        if self.first { hash.wrapping_mul(self.ranks - 1) } else { hash.wrapping_neg() }
    }
}

/// What is wrong with the weights of micro-batches.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// A weight that f32 gradients cannot be multiplied by exactly.
    #[error("a micro-batch weighs {weight}; at most {max} is exact in f32: count in larger units")]
    TooLarge {
        /// The weight.
        weight: u64,
        /// The largest there may be.
        max: u64,
    },
    /// All weights of a weighted mean are zero.
    #[error("every rank's weights are 0; a weighted mean needs a positive one")]
    AllZero,
    /// Two ranks that compute the same micro-batches have given them different weights: the lowest that differ.
    #[error(
        "ranks {} and {} compute the same micro-batches and have weighed them differently, {} and {} in all; give a micro-batch \
         the same weight on every rank that computes a part of it", ranks[0], ranks[1], weights[0], weights[1]
    )]
    Apart {
        /// The ranks.
        ranks: [usize; 2],
        /// The sums of the weights of their micro-batches.
        weights: [u64; 2],
    },
    /// Some ranks have; a GPU, which decides without the host, does not tell which.
    #[error(
        "ranks that compute the same micro-batches have weighed them differently; give a micro-batch the same weight on \
         every rank that computes a part of it"
    )]
    Somewhere,
}

/// A digest of weights, one after the other.
pub(crate) fn weighed(so_far: u64, weight: u64) -> u64 {
    xxh3_64_with_seed(&weight.to_le_bytes(), so_far)
}

impl Optimizer {
    /// What this rank adds to a sum that is 0 where ranks have weighed alike what they are to weigh alike.
    pub(crate) fn balance(&self) -> u64 {
        let weighted = self.options.combine == Combine::Weighted;
        if weighted { self.handover.fixed.place.balance(self.progress.weights) } else { 0 }
    }

    /// Names the ranks where that sum was not 0. Collective.
    pub(crate) fn check_weights(&self, comm: &dyn Communicator, balanced: bool) -> Result<(), Error> {
        if balanced {
            return Ok(());
        }
        let (place, progress) = (self.handover.fixed.place, &self.progress);
        let mine = [place.index, progress.weights, progress.weight];
        let all = gather_words(comm, &self.options, &mine)?;
        let all: Vec<&[u64]> = all.chunks(mine.len()).collect();
        let mut firsts = HashMap::new();
        let apart = (0..all.len()).find_map(|rank| {
            let first = *firsts.entry(all[rank][0]).or_insert(rank);
            (all[first][1] != all[rank][1]).then_some([first, rank])
        });
        let apart = apart.map(|ranks| WeightError::Apart { ranks, weights: ranks.map(|rank| all[rank][2]) });
        Err(apart.unwrap_or(WeightError::Somewhere).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum over the ranks of two places, whose sequences of weights these are.
    fn sum(places: [&[&[u64]]; 2]) -> u64 {
        let mut sum = 0u64;
        for (index, weights) in places.into_iter().enumerate() {
            for (rank, weights) in weights.iter().enumerate() {
                let place =
                    DataPlace { index: index as u64, ranks: places[index].len() as u64, first: rank == 0 };
                let digest = weights.iter().fold(0, |so_far, &weight| weighed(so_far, weight));
                sum = sum.wrapping_add(place.balance(digest));
            }
        }
        sum
    }

    #[test]
    fn weights_do_not_make_up_for_each_other() {
        let alike: [&[&[u64]]; 2] = [&[&[3, 4], &[3, 4], &[3, 4]], &[&[0], &[0]]];
        assert_eq!(sum(alike), 0);
        assert_eq!(sum([&[&[7]], &[&[8]]]), 0);
        let apart: [[&[&[u64]]; 2]; 5] = [
            [&[&[7], &[6], &[8]], &[&[0], &[0]]],
            [&[&[7], &[8]], &[&[8], &[7]]],
            [&[&[3, 4], &[4, 3]], &[&[0], &[0]]],
            [&[&[1], &[1], &[0]], &[&[1], &[1]]],
            [&[&[1], &[0], &[0]], &[&[2], &[2]]],
        ];
        for weights in apart {
            assert_ne!(sum(weights), 0, "{weights:?}");
        }
    }
}
