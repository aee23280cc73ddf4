//! Interface for crates that extend the optimizer; a training program does not need it.
//!
//! | item | purpose |
//! |---|---|
//! | [`OptimizerExchange`] | steps with hooks, checks, counters and gathers of an [`Optimizer`](crate::Optimizer) |
//! | [`UpdateHooks`] | work before and after the update of a step |
//! | [`Params`], [`OwnedPart`], [`VectorKind`] | the parameters and state of this rank, by bucket |
//! | [`host_words`] | operations on a buffer, and exchanges of a few words of the host |
//! | [`mix_digest`], [`overlap`], [`ring_all_reduce`] | arithmetic that plans share |
//!
//! Callers keep the optimizer's invariants themselves: all ranks make the same calls in the same order, and a changed master or
//! parameter is followed by [`Params::follow_master`] and [`OptimizerExchange::gather_all`].

mod exchange;

pub use exchange::{OptimizerExchange, OwnedPart, host_words};

pub use crate::config::digest::digest as mix_digest;
pub use crate::plan::bytes::ring_all_reduce;
pub use crate::update::hooks::UpdateHooks;
pub use crate::update::params::Params;
pub use crate::update::segments::overlap;
pub use crate::update::values::VectorKind;
