//! Operations on flat vectors on the CPU or a GPU: sums of gradients, casts and scaling.

pub(crate) mod accumulate;
pub(crate) mod norm_sum;
pub(crate) mod placed;
