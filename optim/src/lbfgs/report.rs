//! What a closure tells a step of L-BFGS, and what the step tells its caller.

use meshstep_tensor::Slice;

/// What one shard's closure knows of the loss.
///
/// Sums are exact and means are rounded once, so that the loss does not depend on how many shards there are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    /// The whole loss, computed alike on every shard: that is checked.
    Whole(f64),
    /// This shard's part of it; the loss is the sum.
    Part(f64),
    /// A mean over this shard's data; the loss is the mean weighted by `weight`, a number of samples.
    Mean {
        /// The mean here.
        value: f64,
        /// What it weighs.
        weight: u64,
    },
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stop {
    /// No gradient element is larger than the tolerance.
    Gradient,
    /// The direction does not descend: `g . d > -tolerance_change`.
    Direction,
    /// No parameter changed by more than the tolerance.
    Parameters,
    /// The loss changed by less than the tolerance.
    Loss,
    /// All iterations are used up.
    Iterations,
    /// All evaluations are used up.
    Evaluations,
    /// Loss or gradient stayed not finite along a direction; the parameters are where it began.
    NotFinite,
}

/// An iterate with its loss and gradient.
#[derive(Clone, Copy, Debug)]
pub struct Iterate<'a> {
    /// Iterations of this step that led here; 0 where it began.
    pub iteration: u64,
    /// Evaluations of this step so far.
    pub evaluations: u64,
    /// The loss.
    pub loss: f64,
    /// The gradient's norm.
    pub grad_norm: f64,
    /// The largest magnitude in the gradient.
    pub grad_max: f64,
    /// This shard's parameters: f32 or f64.
    pub x: Slice<'a>,
}

/// What a step of L-BFGS did: the same on every shard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LbfgsReport {
    /// The loss where the step began.
    pub first_loss: f64,
    /// The last loss known: of where the step ended, except that the last iteration with a fixed step moves on without
    /// another evaluation.
    pub loss: f64,
    /// The norm of the last gradient known.
    pub grad_norm: f64,
    /// Its largest magnitude.
    pub grad_max: f64,
    /// Iterations of this step.
    pub iterations: u64,
    /// Evaluations of this step.
    pub evaluations: u64,
    /// Exchanges with the other shards in this step.
    pub folds: u64,
    /// Why it ended.
    pub stop: Stop,
}
