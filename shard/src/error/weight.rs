//! Errors of the weights of micro-batches.

/// Error in the weights of micro-batches.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// Gradients in f32 cannot be multiplied by the weight exactly.
    #[error("a micro-batch weighs {weight}; at most {max} is exact in f32: count in larger units")]
    TooLarge {
        /// The weight.
        weight: u64,
        /// Maximum weight.
        max: u64,
    },
    /// All weights of a weighted mean are zero.
    #[error("every rank's weights are 0; a weighted mean needs a positive one")]
    AllZero,
    /// Two ranks give the same micro-batches different weights: the lowest such pair.
    #[error(
        "ranks {} and {} compute the same micro-batches and give them different weights, {} and {} in all; give a micro-batch \
         the same weight on every rank that computes a part of it", ranks[0], ranks[1], weights[0], weights[1]
    )]
    Apart {
        /// The ranks.
        ranks: [usize; 2],
        /// Sum of each rank's weights.
        weights: [u64; 2],
    },
    /// Some ranks give the same micro-batches different weights; a GPU decides without the host, and does not find out which.
    #[error(
        "ranks that compute the same micro-batches give them different weights; give a micro-batch the same weight on \
         every rank that computes a part of it"
    )]
    Somewhere,
}

meshstep_tensor::debug_is_display!(WeightError);
