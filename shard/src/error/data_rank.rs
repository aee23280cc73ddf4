//! Errors of the data places of ranks.

/// Error in the data places of ranks.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DataRankError {
    /// A place claims to have no rank.
    #[error("data place {index} is given with 0 ranks; count this rank too")]
    NoRanks {
        /// The place.
        index: u64,
    },
    /// Two ranks give different sizes of one place: the lowest such pair.
    #[error(
        "ranks {} and {} give data place {index} sizes of {} and {} ranks; give ranks with other micro-batches \
         another index, and ranks with the same ones the same size", ranks[0], ranks[1], says[0], says[1]
    )]
    Apart {
        /// The place.
        index: u64,
        /// The ranks.
        ranks: [usize; 2],
        /// The size that each rank gives.
        says: [u64; 2],
    },
    /// A place has more or fewer ranks than its size.
    #[error(
        "{there} ranks are at data place {index}, and give its size as {says}; give one index to the ranks that compute the same \
         micro-batches, all of them and no others"
    )]
    Count {
        /// The place.
        index: u64,
        /// The size that its ranks give.
        says: u64,
        /// The number of its ranks.
        there: u64,
    },
    /// A place has no rank with weights that count, or several.
    #[error(
        "at data place {index} {firsts} of {ranks} ranks are the first; set `first` on exactly one rank that computes the \
         same micro-batches"
    )]
    Firsts {
        /// The place.
        index: u64,
        /// Number of its ranks.
        ranks: u64,
        /// Number of ranks that claim to be the first.
        firsts: u64,
    },
}

meshstep_tensor::debug_is_display!(DataRankError);
