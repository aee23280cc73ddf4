//! Errors of the calls that all ranks make together.

use super::error::CheckpointError;

/// Error of a save, a load, or another call of checkpoints.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank could not do its part: the same error on every rank, and nothing was changed.
    #[error(transparent)]
    Failed(#[from] Box<Failed>),
    /// The optimizer takes part in no call of all ranks, or communication failed.
    #[error(transparent)]
    Shard(#[from] meshstep_shard::Error),
}

meshstep_tensor::debug_is_display!(Error);

/// Failure of one rank, the same on every rank. The text includes that of `error`, which is therefore not its source.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("on rank {rank}: {error}")]
pub struct Failed {
    /// Rank that failed, the lowest if there are several.
    pub rank: usize,
    /// Error on that rank.
    pub error: CheckpointError,
}

meshstep_tensor::debug_is_display!(Failed);

impl From<meshstep_comm::Error> for Error {
    fn from(error: meshstep_comm::Error) -> Self {
        Error::Shard(error.into())
    }
}

impl From<meshstep_tensor::Error> for Error {
    fn from(error: meshstep_tensor::Error) -> Self {
        Error::Shard(error.into())
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        Box::new(failed).into()
    }
}
