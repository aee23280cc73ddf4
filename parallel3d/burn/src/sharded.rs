//! Optimizer of all ranks for the parameters of a burn module.

use crate::values::{FirstValues, FromRank0, Listing, Refreshing};
use crate::{BackwardPass, Error, memory, walk};
use burn::module::Module;
use meshstep_comm::Communicator;
use meshstep_shard::{Groups, Optimizer, Options, Outcome, Stage, Step, StepArgs, same_everywhere};
use meshstep_tensor::{Category, Claim, Param, Place, SliceMut};
use std::collections::HashSet;
use std::sync::Arc;

/// Optimizer that all ranks step together, for the parameters of a burn module: an [`Optimizer`], or with [`over`](Self::over) any
/// wrapper of one.
///
/// Each rank runs forward and backward on its own batch. A step reduces the gradients of all ranks, updates this rank's shard, and
/// writes the new parameters into the module: every rank then has the same values. Each call is made by all ranks, in the same order.
///
/// The module stays the caller's. Calls compare its parameters with the optimizer's by path, shape and type; an error leaves it as it is.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_nn::LinearConfig;
/// use meshstep_burn::Sharded;
/// use meshstep_optim::AdamW;
/// use meshstep_shard::{Options, Stage, StepArgs};
///
/// let losses = meshstep_comm::loopback::spawn(4, |comm| -> Result<f32, meshstep_burn::Error> {
///     let (device, rank) = (Device::flex().autodiff(), comm.rank() as f32);
///     let mut model = LinearConfig::new(2, 1).init(&device);
///     let options = Options { stage: Stage::Zero2, ..Options::default() };
///     let mut opt = Sharded::new(comm, &mut model, AdamW::default(), options)?; // rank 0's values, on every rank
///     let batch = Tensor::<2>::from_floats([[rank, 1.0], [1.0, rank]], &device);
///     for _ in 0..10 {
///         let loss = model.forward(batch.clone()).square().mean();
///         opt.backward_step(&mut model, loss, StepArgs { lr: 0.01, ..StepArgs::default() })?;
///     }
///     Ok(model.forward(batch).square().mean().into_scalar())
/// })?;
/// assert!(losses.into_iter().all(|loss| loss.is_ok()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Sharded<S = Optimizer> {
    pub(crate) optimizer: S,
    /// Counts burn's copy of the parameters while it exists.
    _framework: Claim,
}

impl Sharded {
    /// Builds an optimizer for the parameters of `model` that require gradients, updated by `rule` (one rule, or
    /// [`Groups`]). Collective.
    ///
    /// Every rank passes a module of the same structure, the same rule and the same options. The values of rank 0 are broadcast:
    /// afterwards the float tensors of every rank's module hold them, frozen ones and running means too (quantized ones excepted). With
    /// [`Initial::Compare`](meshstep_shard::Initial::Compare) the parameters that train must be equal instead, and a difference is an
    /// error.
    ///
    /// The optimizer holds the parameters from now on, and each step overwrites the module's: load a record before. Parameters that
    /// do not require a gradient now cannot train later. One that is frozen later has no gradient, which
    /// [`Options::missing`](meshstep_shard::Options::missing) decides about; [`Optimizer::set_frozen`] declares it.
    ///
    /// # Errors
    /// On every rank: [`Error::NothingTrains`], [`Error::DType`], [`Error::NoPath`], [`Error::SameId`] or [`Error::Read`] of this
    /// rank's module, [`Error::WholeParameters`] at stage 3, [`Error::QueuePlace`], [`Error::Device`], and [`Error::Shard`] if ranks
    /// differ or the cause is on another rank.
    pub fn new<M: Module>(
        comm: Arc<dyn Communicator>,
        model: &mut M,
        rule: impl Into<Groups>,
        options: Options,
    ) -> Result<Self, Error> {
        let ready = check(&options, model).and_then(|()| Listing::new(model));
        let ready = ready.and_then(|listing| Ok((listing.layout()?, FirstValues::new(model)?, listing)));
        let text = match &ready {
            Ok((_, _, listing)) => format!("burn parameters = ready\n{}", listing.frozen_lines()),
            Err(error) => format!("burn parameters = {}\n", error.to_string().replace('\n', " ")),
        };
        let same = same_everywhere(&*comm, &options, &text);
        let (layout, values, listing) = ready?;
        same?;
        let framework = options.meter.claim(Category::Framework, listing.bytes());
        let from_0 = FromRank0 { comm: &*comm, layout: &layout, options: &options, own: &values };
        let whole = walk::replace(model.clone(), &mut { from_0 }).inspect_err(|_| comm.abort())?;
        let first = |param: &Param, out: SliceMut<'_>| first_values(&values, param, out);
        let optimizer = Optimizer::new(comm, layout, rule, first, options)?;
        *model = whole;
        let sharded = Sharded { optimizer, _framework: framework };
        sharded.refresh(model)?;
        Ok(sharded)
    }

    /// Takes the step, and writes the new parameters into the module. Collective ([`Optimizer::step`]).
    ///
    /// # Errors
    /// [`Error::Shard`] of the step, and [`Error::Differs`], [`Error::NoParameter`], [`Error::NotListed`] or [`Error::SameId`] of the
    /// module, before the step: this rank can call `step` again with the right module.
    pub fn step<M: Module>(&mut self, model: &mut M, at: StepArgs) -> Result<Outcome, Error> {
        self.check(model)?;
        self.step_checked(model, at)
    }

    /// Runs [`backward`](Self::backward) and takes the [`step`](Self::step). If the backward pass of a rank fails, that rank returns
    /// the cause, every other rank [`meshstep_shard::Error::Fault`], and nothing changes.
    pub fn backward_step<M: Module>(
        &mut self,
        model: &mut M,
        pass: impl Into<BackwardPass>,
        at: StepArgs,
    ) -> Result<Outcome, Error> {
        let passed = self.backward(model, pass);
        if let Err(Error::Shard(meshstep_shard::Error::StepDue)) = passed {
            return Err(meshstep_shard::Error::StepDue.into()); // a step would take the gradients of an earlier pass
        }
        let stepped = self.step_checked(model, at);
        passed.and(stepped)
    }

    /// Takes the step for a module that was checked, or whose failed pass makes the step an error.
    fn step_checked<M: Module>(&mut self, model: &mut M, at: StepArgs) -> Result<Outcome, Error> {
        let outcome = self.optimizer.step(at)?.outcome()?;
        if let Outcome::Applied { .. } = outcome {
            self.write(model)?;
        }
        Ok(outcome)
    }
}

/// Calls with any optimizer.
impl<S: Step<Error: std::error::Error + Send + Sync + 'static>> Sharded<S> {
    /// Couples a module with an optimizer that exists: one of a mesh, of workers that exchange seldom, of replicas in groups. The
    /// module has each of its parameters, under the parameter's name, and gets the optimizer's values. No other rank takes part.
    /// [`wrapper_step`](Self::wrapper_step) takes its steps.
    ///
    /// # Errors
    /// [`Error::WholeParameters`], [`Error::QueuePlace`], [`Error::Device`], and the errors of the module of [`step`](Sharded::step).
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_nn::LinearConfig;
    /// use meshstep_burn::Sharded;
    /// use meshstep_optim::Sgd;
    /// use meshstep_shard::{CrossShard, Options, StepArgs};
    /// use meshstep_tensor::{DType, Layout};
    ///
    /// let ranks = meshstep_comm::loopback::spawn(2, |comm| -> Result<f32, meshstep_burn::Error> {
    ///     let layout = Layout::builder().param("weight", &[2, 1], DType::F32).build()?;
    ///     let groups = CrossShard::new(comm, None, layout, Sgd::default(), |_, _| Ok(()), Options::default())?;
    ///     let device = Device::flex().autodiff();
    ///     let mut model = LinearConfig::new(2, 1).with_bias(false).init(&device);
    ///     let mut opt = Sharded::over(groups, &mut model)?; // the weight is 0 now, as the optimizer has it
    ///     let loss = model.forward(Tensor::<2>::from_floats([[2.0, 2.0]], &device)).sum();
    ///     opt.backward(&model, loss)?;
    ///     opt.wrapper_step(&mut model, StepArgs { lr: 0.5, ..StepArgs::default() })?.outcome()?;
    ///     Ok(model.weight.val().sum().into_scalar())
    /// })?;
    /// assert!(ranks.into_iter().all(|sum| sum.is_ok_and(|sum| sum == -2.0)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn over<M: Module>(optimizer: S, model: &mut M) -> Result<Self, Error> {
        let inner = optimizer.optimizer();
        check(inner.options(), model)?;
        let framework = inner.options().meter.claim(Category::Framework, Listing::new(model)?.bytes());
        let sharded = Sharded { optimizer, _framework: framework };
        sharded.refresh(model)?;
        Ok(sharded)
    }

    /// Takes the step of a wrapper ([`Step::step`]), and writes the new parameters into the module.
    pub fn wrapper_step<M: Module>(&mut self, model: &mut M, at: StepArgs) -> Result<S::Outcome, Error> {
        self.check(model)?;
        let outcome = self.optimizer.step(at).map_err(Error::of_step)?;
        self.write(model)?;
        Ok(outcome)
    }

    /// Takes the parameters to where the model is evaluated ([`Optimizer::begin_evaluation`]), and writes them into the module.
    /// Collective.
    ///
    /// # Errors
    /// [`Error::Shard`], for example if no rule is evaluated elsewhere, and the errors of the module of [`step`](Sharded::step).
    pub fn begin_evaluation<M: Module>(&mut self, model: &mut M) -> Result<(), Error> {
        self.check(model)?;
        self.optimizer.begin_evaluation().map_err(Error::of_step)?;
        self.write(model)
    }

    /// Takes the parameters back to where they are trained, and writes them into the module. Collective.
    ///
    /// # Errors
    /// As [`begin_evaluation`](Self::begin_evaluation).
    pub fn end_evaluation<M: Module>(&mut self, model: &mut M) -> Result<(), Error> {
        self.check(model)?;
        self.optimizer.end_evaluation().map_err(Error::of_step)?;
        self.write(model)
    }

    /// Runs the backward pass of the step's last micro-batch, usually its only one, and hands over every parameter's gradient. The
    /// loss is multiplied by the [loss scale](Optimizer::loss_scale) before.
    ///
    /// # Errors
    /// [`Error::LossShape`], [`Error::NoGraph`], [`Error::Read`], and the errors of the module of [`step`](Sharded::step); the step is
    /// then [`meshstep_shard::Error::Fault`] on every rank. [`Error::Shard`] of the micro-batch.
    ///
    /// # Panics
    /// As burn's `Tensor::backward` does, if an earlier pass has consumed a part of the loss's graph.
    pub fn backward(&mut self, model: &impl Module, pass: impl Into<BackwardPass>) -> Result<(), Error> {
        self.run(model, pass.into(), true)
    }

    /// Runs the backward pass of a micro-batch that is not the step's last ([`Optimizer::accumulate`]).
    ///
    /// # Errors
    /// # Panics
    /// As [`backward`](Self::backward).
    pub fn accumulate(&mut self, model: &impl Module, pass: impl Into<BackwardPass>) -> Result<(), Error> {
        self.run(model, pass.into(), false)
    }

    /// Copies the optimizer's parameters into the module: after a load into [`optimizer_mut`](Self::optimizer_mut), or into another
    /// module of the same structure.
    pub fn refresh<M: Module>(&self, model: &mut M) -> Result<(), Error> {
        self.check(model)?;
        self.write(model)
    }

    /// Copies the optimizer's parameters into a module that was checked.
    fn write<M: Module>(&self, model: &mut M) -> Result<(), Error> {
        let inner = self.optimizer.optimizer();
        let bytes = inner.params().map(|param| (param.len() * param.dtype().size()) as u64).sum();
        let _both = inner.options().meter.claim(Category::Framework, bytes);
        *model = Refreshing::replace(inner, model.clone())?;
        Ok(())
    }

    /// Returns the optimizer: parameters, state, options, communicator.
    pub fn optimizer(&self) -> &S {
        &self.optimizer
    }

    /// Returns the optimizer for calls between steps. After one that changes parameters, call [`refresh`](Self::refresh).
    pub fn optimizer_mut(&mut self) -> &mut S {
        &mut self.optimizer
    }

    fn check(&self, model: &impl Module) -> Result<(), Error> {
        Listing::new(model)?.check(self.optimizer.optimizer())
    }

    fn run(&mut self, model: &impl Module, pass: BackwardPass, last: bool) -> Result<(), Error> {
        let fits = self.check(model);
        let inner = self.optimizer.optimizer();
        let trains = |param: &&Param| inner.is_frozen(param.name()).is_ok_and(|frozen| !frozen);
        let names: HashSet<Arc<str>> = inner.params().filter(trains).map(Param::shared_name).collect();
        let micro_batch = match last {
            true => self.optimizer.micro_batch(pass.weight),
            false => self.optimizer.accumulate(pass.weight),
        };
        let micro_batch = micro_batch.map_err(Error::of_step)?;
        // A micro-batch that an error drops unfinished makes the step an error on every rank.
        fits.and_then(|()| pass.run(model, &names, &micro_batch))?;
        Ok(micro_batch.finish()?)
    }
}

/// Refuses options that this burn module cannot have.
fn check(options: &Options, model: &impl Module) -> Result<(), Error> {
    match (options.stage, options.queue.place()) {
        (Stage::Zero3, _) => Err(Error::WholeParameters),
        (_, Place::Cpu) => Ok(()),
        (_, place) => on_gpu(place, options, model),
    }
}

/// Checks that the module is on the GPU of the queue.
#[cfg(feature = "cuda")]
fn on_gpu(_: Place, options: &Options, model: &impl Module) -> Result<(), Error> {
    walk::read(model, &mut crate::cuda::OnGpu(&options.queue))
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(place: Place, _: &Options, _: &impl Module) -> Result<(), Error> {
    Err(Error::QueuePlace { place })
}

/// Copies a parameter's values into the optimizer's memory.
fn first_values(
    values: &FirstValues,
    param: &Param,
    mut out: SliceMut<'_>,
) -> Result<(), meshstep_tensor::Error> {
    let name = param.name();
    let copied = values.get(name).map(|own| memory::with_values(name, own, |own| out.copy_from(own)));
    assert!(matches!(copied, Some(Ok(_))), "the layout names parameters whose values were read");
    copied.and_then(Result::ok).unwrap_or(Ok(()))
}
