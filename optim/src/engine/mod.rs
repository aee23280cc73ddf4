//! Passes over flat vectors: one sweep reads gradients and state, applies a rule, and writes parameters and state.

pub(crate) mod check;
pub(crate) mod cpu;
pub(crate) mod decay;
pub mod elementwise;
pub(crate) mod frame;
pub(crate) mod moments;
pub(crate) mod pass;
pub(crate) mod streams;
pub(crate) mod strided;
pub(crate) mod sweep;
pub(crate) mod view;
