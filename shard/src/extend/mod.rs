//! Interface for crates that extend the optimizer, such as checkpoints. Training programs do not need it.
//!
//! | item | access |
//! |---|---|
//! | [`OptimizerShard`] | parameters, state and counters of an [`Optimizer`](crate::Optimizer) on this rank, and calls of all ranks |
//! | [`LbfgsShard`] | point and history of a [`ShardedLbfgs`](crate::ShardedLbfgs) |
//! | [`GroupShard`] | the group of a [`CrossShard`](crate::CrossShard), and calls of all groups |
//! | [`VectorKind`], [`ParamShard`], [`RunProgress`] | descriptions of vectors, parameters and counters |
//! | [`host_words`] | operations of ranks on words and memory of the host or of a GPU |
//! | [`describe_schedule`], [`objection`], [`mix_digest`] | texts and digests that ranks compare |

mod shard;

pub use crate::closure::lbfgs::shard::LbfgsShard;
pub use crate::config::digest::digest as mix_digest;
pub use crate::config::schedule::describe as describe_schedule;
pub use crate::cross_shard::shard::GroupShard;
pub use crate::reduce::together::objection;
pub use crate::update::values::VectorKind;
pub use shard::{OptimizerShard, ParamShard, RunProgress};

/// Operations on a buffer, exchanges of a few words of the host, and access to memory, on a communicator that may have GPU buffers.
pub mod host_words {
    pub use crate::ranks::host_words::{all_reduce, fill, read, run};
}
