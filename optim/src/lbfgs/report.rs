//! Loss returned by a closure, and the report of a step of L-BFGS.

use meshstep_tensor::Slice;

/// Loss as known to one shard's closure.
///
/// Sums are exact and means are rounded once, so the loss does not depend on the number of shards.
///
/// ```
/// use meshstep_optim::{Alone, Iterate, Lbfgs, LbfgsError, LbfgsReport, LbfgsState, LineSearch, Loss, Stop};
/// use meshstep_tensor::{DType, Meter, Slice, SliceMut};
///
/// let rule = Lbfgs { line_search: LineSearch::StrongWolfe, ..Lbfgs::default() };
/// let mut state: LbfgsState = rule.state(2, DType::F64, &Meter::new())?;
/// let mut x = [3f64, -1.0];
/// // (x0 - 1)^2 + 10 (x1 - 2)^2
/// let square = |x: Slice<'_>, mut grad: SliceMut<'_>| -> Result<Loss, meshstep_tensor::Error> {
///     let (x, grad) = (x.typed::<f64>()?, grad.typed_mut::<f64>()?);
///     grad.copy_from_slice(&[2.0 * (x[0] - 1.0), 20.0 * (x[1] - 2.0)]);
///     Ok(Loss::Whole((x[0] - 1.0).powi(2) + 10.0 * (x[1] - 2.0).powi(2)))
/// };
/// let mut losses = Vec::new();
/// let each = |at: &Iterate<'_>| losses.push(at.loss);
/// let report: LbfgsReport = rule.step_with((&mut x).into(), square, &Alone, &mut state, each)?;
/// assert!(matches!(report.stop, Stop::Gradient | Stop::Loss | Stop::Parameters | Stop::Direction));
/// assert!((x[0] - 1.0).abs() < 1e-3 && (x[1] - 2.0).abs() < 1e-3 && losses.is_sorted_by(|a, b| a >= b));
///
/// let nan = |_: Slice<'_>, _: SliceMut<'_>| -> Result<Loss, meshstep_tensor::Error> { Ok(Loss::Whole(f64::NAN)) };
/// let refused = rule.step((&mut x).into(), nan, &Alone, &mut rule.state(2, DType::F64, &Meter::new())?);
/// assert!(matches!(refused, Err(LbfgsError::NotFinite { .. })));
/// # Ok::<(), LbfgsError<meshstep_tensor::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    /// The whole loss, equal on every shard; this is checked.
    Whole(f64),
    /// This shard's part of the loss; the loss is the sum over shards.
    Part(f64),
    /// Mean over this shard's data; the loss is the mean weighted by `weight`, a number of samples.
    Mean {
        /// Mean of this shard.
        value: f64,
        /// Weight of this shard.
        weight: u64,
    },
}

/// Reason for the end of a step.
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
    /// The iteration limit is reached.
    Iterations,
    /// The evaluation limit is reached.
    Evaluations,
    /// Loss or gradient was not finite at any trial along a direction; the parameters are at its start.
    NotFinite,
    /// A scheduler asked some rank to end the run. L-BFGS itself does not return it.
    Preempted,
}

/// An iterate with its loss and gradient.
#[derive(Clone, Copy, Debug)]
pub struct Iterate<'a> {
    /// Iterations of this step so far; 0 at its start.
    pub iteration: u64,
    /// Evaluations of this step so far.
    pub evaluations: u64,
    /// Loss of the iterate.
    pub loss: f64,
    /// Norm of the gradient.
    pub grad_norm: f64,
    /// Largest magnitude in the gradient.
    pub grad_max: f64,
    /// This shard's parameters: f32 or f64.
    pub x: Slice<'a>,
}

/// Report of a step of L-BFGS, the same on every shard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LbfgsReport {
    /// Loss at the start of the step.
    pub first_loss: f64,
    /// Last loss known: that of the end point, except that the last iteration with a fixed step moves on without another evaluation.
    pub loss: f64,
    /// Norm of the last gradient known.
    pub grad_norm: f64,
    /// Largest magnitude of the last gradient known.
    pub grad_max: f64,
    /// Iterations of this step.
    pub iterations: u64,
    /// Evaluations of this step.
    pub evaluations: u64,
    /// Exchanges with the other shards in this step.
    pub folds: u64,
    /// Reason for the end of the step.
    pub stop: Stop,
}
