//! Steps that evaluate a closure, and runs of such steps to a tolerance.

use crate::closure::lbfgs::{EvaluationFailed, backward};
use crate::reduce::together::objection;
use crate::{Combine, Error, MicroBatch, Optimizer, Outcome, StepArgs};
use meshstep_optim::{ExactSum, Stop};
use std::sync::Arc;

/// Result of a step with a closure: the same on every rank except for the traffic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluated {
    /// Loss of all ranks at the start of the step, combined as their gradients are.
    pub loss: f64,
    /// Outcome of the step.
    pub outcome: Outcome,
}

/// End of a run.
///
/// ```
/// use meshstep_shard::prelude::*;
/// use meshstep_shard::Passed;
///
/// let ends = loopback::spawn(2, |comm| -> Result<f32, meshstep_shard::Error> {
///     let layout = Layout::builder().param("w", &[1], DType::F32).build()?;
///     let mut opt = Optimizer::new(comm, layout, Sgd::default(), |_, _| Ok(()), Options::default())?;
///     let square = |mb: &MicroBatch<'_>| -> Result<f64, meshstep_shard::Error> {
///         let w = mb.param("w")?.typed::<f32>()?[0];
///         mb.grad("w", &[2.0 * (w - 3.0)])?; // of (w - 3)^2, on each rank's data
///         Ok(f64::from(w - 3.0).powi(2))
///     };
///     let at = StepArgs { lr: 0.25, ..StepArgs::default() };
///     let first: Evaluated = opt.step_with(at, 1, square)?;
///     assert_eq!(first.loss, 9.0);
///     let until = Until { tolerance_grad: 1e-4, ..Until::default() };
///     let run: Minimized = opt.minimize(until, |_| at, 1, square)?;
///     let passed: &[Passed] = &run.history;
///     assert!(passed.len() as u64 == run.evaluations && passed[0].loss == 2.25);
///     Ok(opt.param("w")?.typed::<f32>()?[0])
/// })?;
/// assert!(ends.into_iter().all(|w| w.is_ok_and(|w| (w - 3.0).abs() < 1e-3)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Until {
    /// Stops when the gradient's norm is at most this.
    pub tolerance_grad: f64,
    /// Stops when the loss changes by less than this from one iteration to the next. Iterations that do not move the parameters
    /// do not count: a skipped step, a learning rate of 0, and the run's first update, in which some rules only store the
    /// gradient.
    pub tolerance_change: f64,
    /// Stops after this number of iterations.
    pub max_iter: u64,
}

impl Default for Until {
    /// The tolerances of PyTorch's L-BFGS, 1,000 iterations.
    fn default() -> Self {
        Until { tolerance_grad: 1e-7, tolerance_change: 1e-9, max_iter: 1000 }
    }
}

/// Result of a run, of any rule or of L-BFGS: the same on every rank. The optimizer holds the parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Minimized {
    /// The last loss evaluated.
    pub loss: f64,
    /// Norm of the last gradient.
    pub grad_norm: f64,
    /// Number of parameter updates.
    pub iterations: u64,
    /// Number of closure calls.
    pub evaluations: u64,
    /// Reason why the run ended.
    pub stop: Stop,
    /// All points that were evaluated and accepted, the first one included.
    pub history: Vec<Passed>,
}

/// A point that a run passed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Passed {
    /// Loss at the point.
    pub loss: f64,
    /// Norm of the gradient at the point. If the gradient was not finite: NaN if the step was skipped, else infinite.
    pub grad_norm: f64,
}

impl Optimizer {
    /// Evaluates `closure` once and takes the step: the closure hands gradients to a micro-batch of weight `weight`, and returns
    /// its loss. Collective. Costs one exchange more than a step: the losses are summed exactly. If the closure fails on one
    /// rank, or is not called there because a step is under way or `weight` is too large, every rank drops the gradients and
    /// returns an error. With sharded parameters such a failure ends the run, if the other ranks wait for gathers of that rank.
    pub fn step_with<E: Into<EvaluationFailed>>(
        &mut self,
        at: StepArgs,
        weight: u64,
        closure: impl FnOnce(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<Evaluated, Error> {
        let loss = self.evaluate(weight, closure)?;
        Ok(Evaluated { loss, outcome: self.step(at)?.outcome()? })
    }

    /// Evaluates `closure` for the step that follows, and returns the loss of all ranks.
    pub(crate) fn evaluate<E: Into<EvaluationFailed>>(
        &mut self,
        weight: u64,
        closure: impl FnOnce(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<f64, Error> {
        self.reducer.healthy()?;
        let told = match self.reducer.check_idle().and_then(|()| self.reducer.check_weight(weight)) {
            Ok(()) => backward(self, weight, closure),
            Err(error) => self.reducer.send_unfilled().and(Err(error)),
        };
        match self.combine_losses(told, weight) {
            Ok(loss) => Ok(loss),
            Err(error) => {
                self.discard_gradients()?;
                Err(error)
            }
        }
    }

    /// Repeats [`step_with`](Self::step_with) until a tolerance or the bound is reached; `at(t)` gives the arguments of step `t`,
    /// from 1. Collective, and the ranks compare `until`. The step of the last iteration has been taken. A request to end the run
    /// ([`Options::preemption`](crate::Options::preemption)) ends it after the step that says so.
    pub fn minimize<E: Into<EvaluationFailed>>(
        &mut self,
        until: Until,
        mut at: impl FnMut(u64) -> StepArgs,
        weight: u64,
        mut closure: impl FnMut(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<Minimized, Error> {
        self.agree_on(&until)?;
        repeat(&until, |t| {
            let at = at(t);
            Ok((at.lr, self.step_with(at, weight, &mut closure)?))
        })
    }

    /// Checks that every rank can begin a run, and with the same end: otherwise one rank would wait for another that has ended.
    pub(crate) fn agree_on(&mut self, until: &Until) -> Result<(), Error> {
        let heard = self.check_outcomes();
        let idle = self.reducer.healthy().and_then(|()| self.reducer.check_idle()).and(heard);
        let mut text = objection(idle.as_ref().err());
        let Until { tolerance_grad, tolerance_change, max_iter } = until;
        text += &format!("tolerance_grad = {tolerance_grad}\ntolerance_change = {tolerance_change}\n");
        text += &format!("max_iter = {max_iter}\n");
        let same = self.reducer.apart(|reducer| reducer.agree_apart(&text));
        idle.and(same.map(drop))
    }

    /// Returns the loss of all ranks, or the error of the lowest rank that failed.
    fn combine_losses(&mut self, told: Result<f64, Error>, weight: u64) -> Result<f64, Error> {
        let comm = Arc::clone(self.comm());
        let weight = if self.params.options.combine == Combine::Weighted { weight } else { 1 };
        // If several ranks compute the same loss, one of them counts it; the loss of no samples is NaN.
        let weight = if self.reducer.config.place.first { weight } else { 0 };
        let mut words = [0; 2 + ExactSum::WORDS];
        let mut fault = [0];
        match &told {
            Ok(_) if weight == 0 => {}
            Ok(loss) => {
                let mut sum = ExactSum::new();
                sum.add_product(*loss, weight as f64);
                (words[0], words[1]) = (u64::from(!loss.is_finite()), weight);
                words[2..].copy_from_slice(&sum.words());
            }
            Err(_) => fault[0] = u64::MAX - comm.rank() as u64,
        }
        self.decider.borrow_words(&self.reducer, &mut words, &mut fault)?;
        if fault[0] != 0 {
            let rank = (u64::MAX - fault[0]) as usize;
            return Err(told.err().unwrap_or(Error::ClosureElsewhere { rank }));
        }
        let sum = ExactSum::from_words(&words[2..]);
        Ok(match self.params.options.combine {
            _ if words[0] > 0 => f64::NAN,
            Combine::Sum => sum.to_f64(),
            Combine::Mean | Combine::Weighted => sum.mean(words[1]),
        })
    }
}

/// Repeats `step`, which returns the learning rate and the evaluation of step `t`, until a tolerance or the bound is reached.
pub(crate) fn repeat<E>(
    until: &Until,
    mut step: impl FnMut(u64) -> Result<(f64, Evaluated), E>,
) -> Result<Minimized, E> {
    let mut history: Vec<Passed> = Vec::new();
    let (mut iterations, mut moved) = (0, false);
    let mut stop = (until.max_iter == 0).then_some(Stop::Iterations);
    while stop.is_none() {
        let (lr, Evaluated { loss, outcome }) = step(history.len() as u64 + 1)?;
        let (grad_norm, applied) = match outcome {
            Outcome::Applied { norm, .. } => (norm, true),
            Outcome::Skipped { .. } => (f64::NAN, false),
        };
        let before = history.last().filter(|_| moved).map_or(f64::NAN, |passed| passed.loss);
        iterations += u64::from(applied);
        moved = applied && iterations > 1 && lr > 0.0;
        history.push(Passed { loss, grad_norm });
        stop = match () {
            () if grad_norm <= until.tolerance_grad => Some(Stop::Gradient),
            () if (loss - before).abs() < until.tolerance_change => Some(Stop::Loss),
            () if history.len() as u64 == until.max_iter => Some(Stop::Iterations),
            () if outcome.preempted() => Some(Stop::Preempted),
            () => None,
        };
    }
    let last = history.last().copied().unwrap_or(Passed { loss: f64::NAN, grad_norm: f64::NAN });
    Ok(Minimized {
        loss: last.loss,
        grad_norm: last.grad_norm,
        iterations,
        evaluations: history.len() as u64,
        stop: stop.unwrap_or(Stop::Iterations),
        history,
    })
}
