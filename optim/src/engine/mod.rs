//! Passes over flat vectors: one sweep reads gradients and state, applies a rule, and writes parameters and state.

pub(crate) mod accumulate;
pub(crate) mod check;
pub(crate) mod frame;
pub(crate) mod moments;
pub(crate) mod pass;
pub(crate) mod placed;
pub(crate) mod streams;
pub(crate) mod strided;
pub(crate) mod sweep;
pub(crate) mod tensor_sums;
pub(crate) mod view;
