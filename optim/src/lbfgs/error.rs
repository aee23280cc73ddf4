//! What can go wrong in a step of L-BFGS.

use crate::{Error, ReduceError};

/// What went wrong, with `E` the closure's own error. The parameters are at the last accepted point, and another step may go
/// on from there; after [`Reduce`](LbfgsError::Reduce) and [`Parted`](LbfgsError::Parted) the other shards may have gone
/// another way, and after [`Alone`](LbfgsError::Alone) they have.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LbfgsError<E> {
    /// This shard's closure failed.
    #[error("the closure failed: {0}")]
    Closure(E),
    /// The closure of another shard failed, or its memory did.
    #[error("the closure failed on shard {part}; its error says why")]
    Elsewhere {
        /// Which shard, the lowest if there are several.
        part: usize,
    },
    /// Where a step begins, loss or gradient is not finite; nothing has changed.
    #[error(
        "a step begins with loss {loss} and {non_finite} gradient elements that are not finite; start where both are finite"
    )]
    NotFinite {
        /// The loss.
        loss: f64,
        /// How many gradient elements are infinite or NaN.
        non_finite: u64,
    },
    /// Shards gave different whole losses.
    #[error("shards have losses from {low} to {high}; give the same everywhere, or `Loss::Part`")]
    LossDiffers {
        /// The lowest.
        low: f64,
        /// The highest.
        high: f64,
    },
    /// Shards were given different hyperparameters or kinds of loss, or have come to different points.
    #[error("the shards' hyperparameters, kinds of loss or progress differ; call step alike on every shard")]
    Parted,
    /// Hyperparameters or memory that cannot work.
    #[error(transparent)]
    Invalid(#[from] Error),
    /// This shard's memory failed between two exchanges. The others do not hear of it and wait for this one: end that.
    #[error("this shard alone cannot go on: {0}")]
    Alone(Error),
    /// The shards could not be brought together.
    #[error(transparent)]
    Reduce(#[from] ReduceError),
}

impl<E> From<meshstep_tensor::Error> for LbfgsError<E> {
    fn from(error: meshstep_tensor::Error) -> Self {
        LbfgsError::Invalid(error.into())
    }
}
