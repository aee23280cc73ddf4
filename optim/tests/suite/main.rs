//! Tests of the crate's public interface, one module for each subject.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

mod allocations;
mod common;
#[cfg(feature = "cuda")]
mod cuda;
mod cuda_kernels;
mod cuda_norms;
mod dots;
mod equality;
mod exact_sum;
mod formulas;
mod hand_over;
mod known_values;
mod layer_wise;
mod lbfgs;
mod loss_scale;
mod matrix_phases;
mod merges;
mod muon;
mod norms;
mod outside_rule;
mod recipes;
mod refusals;
mod schedulefree;
mod schedules;
mod state_slots;
mod threads;
