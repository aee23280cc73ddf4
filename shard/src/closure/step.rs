//! The trait of everything that takes steps: an optimizer, and the wrappers of one.

use crate::closure::lbfgs::EvaluationFailed;
use crate::closure::minimize::{Evaluated, Minimized, Until, repeat};
use crate::{Error, Gathered, MicroBatch, Optimizer, ParamState, Pending, Repaired, StepArgs, Verified};
use meshstep_optim::LossScaleState;
use meshstep_tensor::{Slice, SliceMut};

/// An [`Optimizer`], or a wrapper of one that adds to its step.
///
/// A wrapper has four methods of its own: read access, access for this trait, the step, and its words for an error. All other
/// calls of a training loop follow from these, and all of them fail with the wrapper's error.
///
/// ```
/// use meshstep_shard::prelude::*;
///
/// /// Takes one step on ones.
/// fn train<S: Step>(opt: &mut S) -> Result<S::Outcome, S::Error> {
///     let mb = opt.micro_batch(1)?;
///     mb.grad("w", &[1f32; 2])?;
///     mb.finish()?;
///     opt.step(StepArgs { lr: 0.5, ..StepArgs::default() })
/// }
///
/// let finals = loopback::spawn(2, |comm| -> Result<[f32; 2], meshstep_shard::Error> {
///     let layout = || Layout::builder().param("w", &[2], DType::F32).build();
///     let mut one = Optimizer::new(comm.clone(), layout()?, Sgd::default(), |_, _| Ok(()), Options::default())?;
///     let mut groups = CrossShard::new(comm, None, layout()?, Sgd::default(), |_, _| Ok(()), Options::default())?;
///     train(&mut one)?.outcome()?;
///     train(&mut groups)?.outcome()?;
///     Ok([one.param("w")?.typed::<f32>()?[0], groups.param("w")?.typed::<f32>()?[0]])
/// })?;
/// assert!(finals.into_iter().all(|w| w.is_ok_and(|w| w == [-0.5; 2])));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The trait is object-safe: `&mut dyn Step<Outcome = Pending, Error = Error>` has every method but [`read`](Self::read),
/// [`step_with`](Self::step_with) and [`minimize`](Self::minimize).
pub trait Step {
    /// Result of a step.
    type Outcome;
    /// Error of every call.
    type Error: From<Error>;

    /// Returns the innermost optimizer, for reading.
    fn optimizer(&self) -> &Optimizer;

    /// Returns the innermost optimizer for the provided methods, which alone can use it.
    fn guarded(&mut self) -> Guarded<'_>;

    /// Takes the step. Collective. A wrapper says what it adds to [`Optimizer::step`].
    fn step(&mut self, at: StepArgs) -> Result<Self::Outcome, Self::Error>;

    /// Returns an error of the innermost optimizer as one of this type.
    fn wrap_error(&self, error: Error) -> Self::Error {
        error.into()
    }

    /// Begins the step's last micro-batch ([`Optimizer::micro_batch`]).
    fn micro_batch(&mut self, weight: u64) -> Result<MicroBatch<'_>, Self::Error> {
        Ok(self.guarded().0.micro_batch(weight)?)
    }

    /// Begins a micro-batch that is not the step's last ([`Optimizer::accumulate`]).
    fn accumulate(&mut self, weight: u64) -> Result<MicroBatch<'_>, Self::Error> {
        Ok(self.guarded().0.accumulate(weight)?)
    }

    /// Returns arguments for the next step by the schedule ([`Optimizer::scheduled`]).
    fn scheduled(&mut self) -> Result<StepArgs, Self::Error> {
        let scheduled = self.guarded().0.scheduled();
        scheduled.map_err(|error| self.wrap_error(error))
    }

    /// Evaluates `closure` and takes the step ([`Optimizer::step_with`]).
    fn step_with<E: Into<EvaluationFailed>>(
        &mut self,
        at: StepArgs,
        weight: u64,
        closure: impl FnOnce(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<Evaluated, Self::Error>
    where
        Self: Sized + Step<Outcome = Pending>,
    {
        let loss = self.guarded().0.evaluate(weight, closure);
        let loss = loss.map_err(|error| self.wrap_error(error))?;
        let outcome = self.step(at)?.outcome().map_err(|error| self.wrap_error(error))?;
        Ok(Evaluated { loss, outcome })
    }

    /// Repeats [`step_with`](Self::step_with) until a tolerance or the bound is reached ([`Optimizer::minimize`]).
    fn minimize<E: Into<EvaluationFailed>>(
        &mut self,
        until: Until,
        mut at: impl FnMut(u64) -> StepArgs,
        weight: u64,
        mut closure: impl FnMut(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<Minimized, Self::Error>
    where
        Self: Sized + Step<Outcome = Pending>,
    {
        let agreed = self.guarded().0.agree_on(&until);
        agreed.map_err(|error| self.wrap_error(error))?;
        repeat(&until, |t| {
            let at = at(t);
            Ok((at.lr, self.step_with(at, weight, &mut closure)?))
        })
    }

    /// Drops the gradients handed over since the last step ([`Optimizer::discard_gradients`]).
    fn discard_gradients(&mut self) -> Result<(), Self::Error> {
        let discarded = self.guarded().0.discard_gradients();
        discarded.map_err(|error| self.wrap_error(error))
    }

    /// Compares the values that ranks hold alike ([`Optimizer::verify`]).
    fn verify(&mut self) -> Result<Verified, Self::Error> {
        let verified = self.guarded().0.verify();
        verified.map_err(|error| self.wrap_error(error))
    }

    /// Makes every `steps`th step verify ([`Optimizer::verify_every`]).
    fn verify_every(&mut self, steps: u64) -> Result<(), Self::Error> {
        let set = self.guarded().0.verify_every(steps);
        set.map_err(|error| self.wrap_error(error))
    }

    /// Compares reduced gradients ([`Optimizer::verify_gradients`]).
    fn verify_gradients(&mut self) -> Result<Verified, Self::Error> {
        let verified = self.guarded().0.verify_gradients();
        verified.map_err(|error| self.wrap_error(error))
    }

    /// Gives ranks that differ the values of the majority ([`Optimizer::repair`]).
    fn repair(&mut self) -> Result<Vec<Repaired>, Self::Error> {
        let repaired = self.guarded().0.repair();
        repaired.map_err(|error| self.wrap_error(error))
    }

    /// Flips one bit on this rank, to test verification ([`Optimizer::flip_bit`]).
    fn flip_bit(&mut self, name: &str, slot: &str, element: usize, bit: u32) -> Result<(), Self::Error> {
        let flipped = self.guarded().0.flip_bit(name, slot, element, bit);
        flipped.map_err(|error| self.wrap_error(error))
    }

    /// Restores a saved count of steps ([`Optimizer::restore_steps`]).
    fn restore_steps(&mut self, steps: u64) -> Result<(), Self::Error> {
        let restored = self.guarded().0.restore_steps(steps);
        restored.map_err(|error| self.wrap_error(error))
    }

    /// Restores a saved loss scale ([`Optimizer::restore_loss_scale`]).
    fn restore_loss_scale(&mut self, state: LossScaleState) -> Result<(), Self::Error> {
        let restored = self.guarded().0.restore_loss_scale(state);
        restored.map_err(|error| self.wrap_error(error))
    }

    /// Returns the device address of the loss scale ([`Optimizer::loss_scale_address`]).
    #[cfg(feature = "cuda")]
    fn loss_scale_address(&mut self) -> Result<Option<u64>, Self::Error> {
        let address = self.guarded().0.loss_scale_address();
        address.map_err(|error| self.wrap_error(error))
    }

    /// Makes `alias` another name of the parameter `name` ([`Optimizer::also_called`]).
    fn also_called(&mut self, alias: &str, name: &str) -> Result<(), Self::Error> {
        let called = self.guarded().0.also_called(alias, name);
        called.map_err(|error| self.wrap_error(error))
    }

    /// Takes the parameters to where the model is evaluated ([`Optimizer::begin_evaluation`]).
    fn begin_evaluation(&mut self) -> Result<(), Self::Error> {
        let begun = self.guarded().0.begin_evaluation();
        begun.map_err(|error| self.wrap_error(error))
    }

    /// Takes the parameters back to where they are trained ([`Optimizer::end_evaluation`]).
    fn end_evaluation(&mut self) -> Result<(), Self::Error> {
        let ended = self.guarded().0.end_evaluation();
        ended.map_err(|error| self.wrap_error(error))
    }

    /// Writes the values of a parameter into `out` ([`Optimizer::read`]).
    fn read<'o>(&mut self, name: &str, out: impl Into<SliceMut<'o>>) -> Result<(), Self::Error>
    where
        Self: Sized,
    {
        let read = self.guarded().0.read(name, out);
        read.map_err(|error| self.wrap_error(error))
    }

    /// Returns this rank's values of a parameter ([`Optimizer::param`]).
    fn param(&self, name: &str) -> Result<Slice<'_>, Self::Error> {
        self.optimizer().param(name).map_err(|error| self.wrap_error(error))
    }

    /// Returns the whole values of a unit's parameters ([`Optimizer::gather`]).
    fn gather(&self, unit: &str) -> Result<Gathered<'_>, Self::Error> {
        self.optimizer().gather(unit).map_err(|error| self.wrap_error(error))
    }

    /// Returns this rank's part of a parameter and its state ([`Optimizer::state`]).
    fn state(&self, name: &str) -> Result<ParamState<'_>, Self::Error> {
        self.optimizer().state(name).map_err(|error| self.wrap_error(error))
    }
}

/// The innermost optimizer of a wrapper, which the provided methods of [`Step`] can use and a caller cannot: a caller would take
/// steps that the wrapper misses.
///
/// ```compile_fail,E0616
/// # use meshstep_shard::{Step, StepArgs};
/// fn step_past(wrapper: &mut impl Step) {
///     let _ = wrapper.guarded().0.step(StepArgs::default());
/// }
/// ```
///
/// A wrapper of an optimizer implements four methods, and gets the others:
///
/// ```
/// use meshstep_shard::prelude::*;
/// use meshstep_shard::{Error, Guarded};
///
/// /// Counts its steps.
/// struct Counted(Optimizer, u64);
///
/// impl Step for Counted {
///     type Outcome = Pending;
///     type Error = Error;
///
///     fn optimizer(&self) -> &Optimizer {
///         &self.0
///     }
///
///     fn guarded(&mut self) -> Guarded<'_> {
///         Guarded::new(&mut self.0)
///     }
///
///     fn step(&mut self, at: StepArgs) -> Result<Pending, Error> {
///         self.1 += 1;
///         self.0.step(at)
///     }
///
///     fn wrap_error(&self, error: Error) -> Error {
///         error
///     }
/// }
/// # let _ = |counted: &mut Counted| counted.micro_batch(1).map(drop);
/// ```
#[derive(Debug)]
pub struct Guarded<'a>(&'a mut Optimizer);

impl<'a> Guarded<'a> {
    /// Hands an optimizer to the provided methods.
    pub fn new(optimizer: &'a mut Optimizer) -> Self {
        Guarded(optimizer)
    }
}

/// Inherent methods of the same names take precedence.
impl Step for Optimizer {
    type Outcome = Pending;
    type Error = Error;

    fn optimizer(&self) -> &Optimizer {
        self
    }

    fn guarded(&mut self) -> Guarded<'_> {
        Guarded(self)
    }

    fn step(&mut self, at: StepArgs) -> Result<Pending, Error> {
        self.step(at)
    }
}
