//! Fault of one rank, which makes the step an error on every rank.

/// Reason why a rank cannot take a step.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// A micro-batch was dropped without `finish`.
    #[error("its micro-batch was dropped unfinished")]
    Unfinished,
    /// `step` was called without a last micro-batch.
    #[error("it has no finished micro-batch")]
    NoMicroBatch,
    /// A gradient was not handed over.
    #[error(
        "no gradient for {name:?}; with Options::missing = Missing::SkipIfMissingEverywhere a parameter without one is left alone, with Missing::Zero it counts as zeros"
    )]
    MissingGradient {
        /// The parameter.
        name: String,
    },
    /// The learning rate is negative, or not finite in f32 once scaled or adjusted; or the decay it makes.
    #[error(
        "its lr is out of range; use a number from 0 to 1.8e19, whose square f32 holds, times every lr_scale and weight_decay too"
    )]
    Lr,
    /// The learning rate is not the schedule's for this step.
    #[error(
        "its lr is not what Options::schedule has for this step; take the step with Optimizer::scheduled"
    )]
    Schedule,
    /// The clipping bound is not a finite number above 0.
    #[error("its max_norm is out of range; use a finite number above 0, or None")]
    MaxNorm,
    /// The gradient factor over the loss scale is 0, negative or out of f32's range.
    #[error("its grad_scale over its loss scale is out of range; use a number from 1e-30 to 1e30")]
    GradScale,
}

meshstep_tensor::debug_is_display!(Fault);
