//! The decision of a step: one exchange shows every rank the same words, and every rank decides the same from them.

pub(crate) mod arguments;
pub(crate) mod decider;
pub(crate) mod exchange;
#[cfg(feature = "cuda")]
pub(crate) mod gpu;
pub(crate) mod loss_scale;
#[cfg(not(feature = "cuda"))]
pub(crate) mod no_gpu;
pub(crate) mod outcome;

#[cfg(not(feature = "cuda"))]
pub(crate) use no_gpu as gpu;
