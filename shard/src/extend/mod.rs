//! Interface for crates that extend the optimizer, such as checkpoints and plans of infrequent exchanges. Training programs do not need it.
//!
//! | item | access |
//! |---|---|
//! | [`OptimizerShard`] | parameters, state and counters of an [`Optimizer`](crate::Optimizer) on this rank, and calls of all ranks |
//! | [`OptimizerExchange`] | steps with hooks, checks, counters and gathers of an [`Optimizer`](crate::Optimizer) |
//! | [`LbfgsShard`] | point and history of a [`ShardedLbfgs`](crate::ShardedLbfgs) |
//! | [`GroupShard`] | the group of a [`CrossShard`](crate::CrossShard), and calls of all groups |
//! | [`UpdateHooks`] | work before and after the update of a step |
//! | [`Params`], [`OwnedPart`] | the parameters and state of this rank, by bucket |
//! | [`VectorKind`], [`ParamShard`], [`RunProgress`] | descriptions of vectors, parameters and counters |
//! | [`host_words`] | operations of ranks on words and memory of the host or of a GPU |
//! | [`describe_schedule`], [`objection`], [`mix_digest`], [`overlap`], [`ring_all_reduce`], [`rounding_key`] | texts, digests and arithmetic that ranks compare |
//!
//! Callers keep the optimizer's invariants themselves: all ranks make the same calls in the same order, and a changed master or
//! parameter is followed by [`Params::follow_master`] and [`OptimizerExchange::gather_all`].

mod exchange;
mod shard;

pub use crate::closure::lbfgs::shard::LbfgsShard;
pub use crate::config::digest::digest as mix_digest;
pub use crate::config::precision::rounding_key;
pub use crate::config::schedule::describe as describe_schedule;
pub use crate::cross_shard::shard::GroupShard;
pub use crate::plan::bytes::ring_all_reduce;
pub use crate::plan::overlap::overlap;
pub use crate::reduce::together::objection;
pub use crate::update::hooks::UpdateHooks;
pub use crate::update::params::Params;
pub use crate::update::values::VectorKind;
pub use exchange::{OptimizerExchange, OwnedPart};
pub use shard::{OptimizerShard, ParamShard, RunProgress};

/// Operations on a buffer, exchanges of a few words of the host, and access to memory, on a communicator that may have GPU buffers.
pub mod host_words {
    pub use crate::ranks::host_words::{all_reduce, digest, fill, land, read, run};
}
