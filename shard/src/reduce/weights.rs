//! Weights of micro-batches, and the check that ranks give the same micro-batches the same weights.

use crate::config::options::Combine;
use crate::error::{Error, WeightError};
use crate::ranks::agree::gather_words;
use crate::ranks::data_rank::DataRank;
use crate::reduce::reducer::GradReducer;
use meshstep_comm::Communicator;
use std::collections::HashMap;
use twox_hash::XxHash3_64;

impl DataRank {
    /// Returns a word that sums to 0 over the ranks of this place if they all give the same weights. For different weights the
    /// sum is 0 in one of 2^64 cases: unlike the weights themselves, their hashes do not cancel.
    fn balance(self, weights: u64) -> u64 {
        let hash = XxHash3_64::oneshot_with_seed(self.index, &weights.to_le_bytes());
        if self.first { hash.wrapping_mul(self.ranks - 1) } else { hash.wrapping_neg() }
    }
}

impl GradReducer {
    /// Returns the weight of this rank's micro-batches, or 0 if another rank counts them.
    pub(crate) fn weight(&self) -> u64 {
        if self.config.place.first { self.progress.weight } else { 0 }
    }

    /// Returns this rank's summand of the balance, which is 0 over all ranks if the weights agree.
    pub(crate) fn balance(&self) -> u64 {
        let weighted = self.config.options.combine == Combine::Weighted;
        if weighted { self.config.place.balance(self.progress.weights) } else { 0 }
    }

    /// Finds the ranks with different weights after a balance other than 0. Collective.
    pub(crate) fn unequal_weights(&self, comm: &dyn Communicator) -> Result<Error, Error> {
        let (place, progress) = (self.config.place, &self.progress);
        let mine = [place.index, progress.weights, progress.weight];
        let all = gather_words(comm, &self.config.options, &mine)?;
        let all: Vec<&[u64]> = all.chunks(mine.len()).collect();
        let mut firsts = HashMap::new();
        let apart = (0..all.len()).find_map(|rank| {
            let first = *firsts.entry(all[rank][0]).or_insert(rank);
            (all[first][1] != all[rank][1]).then_some([first, rank])
        });
        let apart = apart.map(|ranks| WeightError::Apart { ranks, weights: ranks.map(|rank| all[rank][2]) });
        Ok(apart.unwrap_or(WeightError::Somewhere).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce::progress::weighed;

    /// Returns the sum over the ranks of two places with these sequences of weights.
    fn sum(places: [&[&[u64]]; 2]) -> u64 {
        let mut sum = 0u64;
        for (index, weights) in places.into_iter().enumerate() {
            for (rank, weights) in weights.iter().enumerate() {
                let place =
                    DataRank { index: index as u64, ranks: places[index].len() as u64, first: rank == 0 };
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
