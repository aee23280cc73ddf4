//! Settings of a worker's optimizer that a method leaves open.

use meshstep_shard::{Options, Stage};
use meshstep_tensor::DType;
use serde::{Deserialize, Serialize};

/// The settings; by default those of the optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tuning {
    /// True if every rank holds all of the optimizer's state, and gradients are all-reduced (stage 0 instead of 1).
    pub(crate) replicated: bool,
    /// True if gradients are sent in bf16 instead of f32.
    pub(crate) bf16: bool,
    /// Elements of a gradient bucket, which travels while the backward pass runs.
    pub(crate) bucket_len: Option<usize>,
    /// Highest learning rate.
    pub(crate) peak: Option<f64>,
}

impl Tuning {
    /// Returns the options of the optimizer.
    pub(super) fn options(&self) -> Options {
        let default = Options::default();
        Options {
            stage: if self.replicated { Stage::Replicated } else { default.stage },
            bucket_len: self.bucket_len,
            grads: self.bf16.then_some(DType::BF16),
            ..default
        }
    }
}
