//! Errors of a step of L-BFGS.

use crate::{Error, ReduceError};
use std::fmt;

/// Error of a step, with `E` the closure's own error. The parameters are at the last accepted point, and another step may continue from
/// there. After [`Reduce`](LbfgsError::Reduce) and [`Parted`](LbfgsError::Parted) the other shards may be at a different point, and after
/// [`Alone`](LbfgsError::Alone) they are.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum LbfgsError<E> {
    /// This shard's closure failed.
    #[error("the closure failed: {0}")]
    Closure(E),
    /// The closure or the memory of another shard failed.
    #[error("the closure failed on shard {part}; its error says why")]
    Elsewhere {
        /// Index of the shard, the lowest one if several failed.
        part: usize,
    },
    /// Loss or gradient is not finite at the start of the step; nothing has changed.
    #[error(
        "a step begins with loss {loss} and {non_finite} gradient elements that are not finite; start where both are finite"
    )]
    NotFinite {
        /// Loss at the start.
        loss: f64,
        /// Number of gradient elements that are infinite or NaN.
        non_finite: u64,
    },
    /// Shards returned different whole losses.
    #[error("shards have losses from {low} to {high}; give the same everywhere, or `Loss::Part`")]
    LossDiffers {
        /// Lowest loss.
        low: f64,
        /// Highest loss.
        high: f64,
    },
    /// Shards have different hyperparameters, kinds of loss, or progress.
    #[error("the shards' hyperparameters, kinds of loss or progress differ; call step alike on every shard")]
    Parted,
    /// Invalid hyperparameters or memory.
    #[error(transparent)]
    Invalid(#[from] Error),
    /// This shard's memory failed between two exchanges. The other shards are not notified and wait for it: end their exchange.
    #[error("this shard alone cannot go on: {0}")]
    Alone(Error),
    /// The reduction over shards failed.
    #[error(transparent)]
    Reduce(#[from] ReduceError),
}

impl<E: fmt::Display> fmt::Debug for LbfgsError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<E> From<meshstep_tensor::Error> for LbfgsError<E> {
    fn from(error: meshstep_tensor::Error) -> Self {
        LbfgsError::Invalid(error.into())
    }
}
