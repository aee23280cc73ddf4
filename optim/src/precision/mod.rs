//! Types of elements: conversions, stochastic rounding, 16-bit remainders, and recipes.

pub(crate) mod number;
pub(crate) mod philox;
pub(crate) mod recipe;
pub mod remainder;
pub(crate) mod stochastic;
