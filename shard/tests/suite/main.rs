//! All tests of the crate's public interface, one module per subject.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    unreachable_pub,
    reason = "tests fail by panicking, say what they skip, and share freely"
)]

mod accounting;
mod allocations;
mod allocator;
mod alone;
mod among;
mod backend;
mod behaviour;
mod complaints;
mod cross_shard;
#[cfg(feature = "cuda")]
mod cuda;
mod equality;
mod evaluation;
mod examples;
mod faults;
mod freezing;
mod gathers;
mod grad_forms;
mod group_predicates;
mod growth;
mod hyperparameters;
mod layer_wise;
mod lbfgs;
mod long_buckets;
mod loss_scale;
mod matrices;
mod matrix_exchange;
mod matrix_owners;
mod misuse;
mod mixed_rules;
#[cfg(feature = "mpi")]
mod mpi;
mod one_pass;
mod one_sided;
mod parts;
mod pool;
mod preemption;
mod prelude;
#[cfg(unix)]
mod processes;
mod propagate;
mod reads;
mod recipes;
mod schedules;
mod slots;
mod threads;
mod verify;

use meshstep_shard_cases as common;
