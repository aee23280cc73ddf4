//! Gradients in: micro-batches fill buckets, and full buckets are reduced over the ranks.

pub(crate) mod accumulate;
pub(crate) mod bucket_fill;
pub(crate) mod chunk_norm;
pub(crate) mod double_ended;
pub(crate) mod gather_barrier;
pub(crate) mod local_clip;
pub(crate) mod micro_batches;
pub(crate) mod pool;
pub(crate) mod progress;
pub(crate) mod reducer;
pub(crate) mod reducer_config;
pub(crate) mod second_reduce;
pub(crate) mod slot_sums;
pub(crate) mod together;
pub(crate) mod wait_budget;
mod weights;
