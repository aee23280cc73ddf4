//! Candle variables that are stepped by a sharded optimizer.

use crate::memory::{overwrite, with_values};
use crate::vars::{NamedVars, Vars};
use crate::{BackwardPass, Error, Tape};
use candle_core::{Tensor, Var};
use meshstep_comm::Communicator;
use meshstep_shard::{Groups, Optimizer, Options, Outcome, Stage, Step, StepArgs, same_everywhere};
use meshstep_tensor::{Category, Claim, Param, Place, SliceMut};
use std::collections::HashMap;
use std::sync::Arc;

/// Candle variables of one rank, and the optimizer that all ranks step together: an [`Optimizer`], or with [`over`](Self::over) any
/// wrapper of one.
///
/// Each rank runs forward and backward on its own batch. A step reduces the gradients of all ranks, updates this rank's shard, and
/// writes the new parameters into the variables in place: every rank then has the same values. Each call is made by all ranks, in the
/// same order.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use meshstep_candle::Sharded;
/// use meshstep_optim::AdamW;
/// use meshstep_shard::{Options, Stage, StepArgs};
///
/// let losses = meshstep_comm::loopback::spawn(4, |comm| -> Result<f32, meshstep_candle::Error> {
///     let (map, rank) = (VarMap::new(), comm.rank() as f32);
///     let model = candle_nn::linear(2, 1, VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
///     let options = Options { stage: Stage::Zero2, ..Options::default() };
///     let mut opt = Sharded::new(comm, &map, AdamW::default(), options)?; // rank 0's values, on every rank
///     let batch = Tensor::new(&[[rank, 1.0], [1.0, rank]], &Device::Cpu)?;
///     for _ in 0..10 {
///         let loss = model.forward(&batch)?.sqr()?.mean_all()?;
///         opt.backward_step(&loss, StepArgs { lr: 0.01, ..StepArgs::default() })?;
///     }
///     Ok(model.forward(&batch)?.sqr()?.mean_all()?.to_scalar::<f32>()?)
/// })?;
/// assert!(losses.into_iter().all(|loss| loss.is_ok()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Sharded<S = Optimizer> {
    pub(crate) optimizer: S,
    vars: Vars,
    /// Counts candle's copy of the parameters while it exists.
    _framework: Claim,
}

impl Sharded {
    /// Builds an optimizer for `vars`, updated by `rule` (one rule, or [`Groups`]). Collective.
    ///
    /// Every rank passes the same names, shapes and types, in the same order, the same rule and the same options. The values of
    /// rank 0 are broadcast: afterwards the variables of every rank hold them. With
    /// [`Initial::Compare`](meshstep_shard::Initial::Compare) the values must be equal instead, and a difference is an error.
    ///
    /// The optimizer holds the parameters from now on, and each step overwrites the variables: load weights into a `VarMap` before. A
    /// backward pass compares eight elements of each variable with the optimizer's, and returns [`Error::Written`] if one differs; other
    /// elements that are written later are lost at the next step. Variables that are added to the map later do not train.
    ///
    /// # Errors
    /// On every rank: [`Error::Device`], [`Error::DType`], [`Error::Strided`] or [`Error::SameVariable`] of a variable of this rank,
    /// [`Error::WholeVariables`] at stage 3, [`Error::QueuePlace`], and [`Error::Shard`] if ranks differ or the cause is on another rank.
    pub fn new(
        comm: Arc<dyn Communicator>,
        vars: impl NamedVars,
        rule: impl Into<Groups>,
        options: Options,
    ) -> Result<Self, Error> {
        let ready = check(&options).and_then(|()| Vars::new(vars));
        let ready = ready.and_then(|vars| Ok((vars.layout()?, vars)));
        let text = ready.as_ref().map_or_else(
            |error| error.to_string().replace('\n', " "),
            |_| "variables that can be trained".into(),
        );
        let same = same_everywhere(&*comm, &options, &format!("candle variables = {text}\n"));
        let (layout, vars) = ready?;
        same?;
        let framework = options.meter.claim(Category::Framework, vars.bytes());
        let optimizer = {
            let by_name: HashMap<&str, &Var> = vars.list.iter().map(|(name, var)| (&**name, var)).collect();
            Optimizer::new(comm, layout, rule, |param, out| first_values(&by_name, param, out), options)?
        };
        let sharded = Sharded { optimizer, vars, _framework: framework };
        sharded.refresh()?;
        Ok(sharded)
    }

    /// Takes the step, and writes the new parameters into the variables. Collective ([`Optimizer::step`]).
    pub fn step(&mut self, at: StepArgs) -> Result<Outcome, Error> {
        let outcome = self.optimizer.step(at)?.outcome()?;
        if let Outcome::Applied { .. } = outcome {
            self.refresh()?;
        }
        Ok(outcome)
    }

    /// Runs [`backward`](Self::backward) and takes the [`step`](Self::step). If the backward pass of a rank fails, that rank returns
    /// the cause, every other rank [`meshstep_shard::Error::Fault`], and nothing changes.
    pub fn backward_step<'a>(
        &mut self,
        pass: impl Into<BackwardPass<'a>>,
        at: StepArgs,
    ) -> Result<Outcome, Error> {
        let passed = self.backward(pass);
        if let Err(Error::Shard(meshstep_shard::Error::StepDue)) = passed {
            return Err(meshstep_shard::Error::StepDue.into()); // a step would take the gradients of an earlier pass
        }
        let stepped = self.step(at);
        passed.and(stepped)
    }

    /// Runs [`backward_step`](Self::backward_step) through the cuts of `tape`.
    pub fn backward_step_cut(&mut self, tape: Tape, loss: &Tensor, at: StepArgs) -> Result<Outcome, Error> {
        self.backward_step(BackwardPass::new(loss).cut(tape), at)
    }
}

/// Calls with any optimizer. The step of a wrapper is [`Step::step`], which writes the new parameters into the variables too.
impl<S: Step<Error: std::error::Error + Send + Sync + 'static>> Sharded<S> {
    /// Couples variables with an optimizer that exists: one of a mesh, of workers that exchange seldom, of replicas in groups. Each
    /// parameter has a variable of its name, shape and type, and the variables get the optimizer's values. No other rank takes part.
    ///
    /// # Errors
    /// Those of a variable of [`new`](Sharded::new), [`Error::WholeVariables`], [`Error::QueuePlace`], and [`Error::Differs`],
    /// [`Error::NoVariable`] or [`meshstep_shard::Error::UnknownParam`] if variables and parameters do not match.
    ///
    /// ```
    /// use candle_core::{Device, Var};
    /// use meshstep_candle::Sharded;
    /// use meshstep_optim::Sgd;
    /// use meshstep_shard::{CrossShard, Options, Step, StepArgs};
    /// use meshstep_tensor::{DType, Layout};
    ///
    /// let ranks = meshstep_comm::loopback::spawn(2, |comm| -> Result<f32, meshstep_candle::Error> {
    ///     let layout = Layout::builder().param("w", &[2], DType::F32).build()?;
    ///     let groups = CrossShard::new(comm, None, layout, Sgd::default(), |_, _| Ok(()), Options::default())?;
    ///     let w = Var::new(&[5f32, 5.0], &Device::Cpu)?;
    ///     let mut opt = Sharded::over(groups, [("w", w.clone())])?; // w is 0 now, as the optimizer has it
    ///     opt.backward(&(w.as_tensor() * 2.0)?.sum_all()?)?;
    ///     opt.step(StepArgs { lr: 0.5, ..StepArgs::default() })?.outcome()?;
    ///     Ok(w.to_vec1::<f32>()?[1])
    /// })?;
    /// assert!(ranks.into_iter().all(|w| w.is_ok_and(|w| w == -1.0)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn over(optimizer: S, vars: impl NamedVars) -> Result<Self, Error> {
        let inner = optimizer.optimizer();
        check(inner.options())?;
        let vars = Vars::new(vars)?;
        vars.check_params(inner)?;
        let framework = inner.options().meter.claim(Category::Framework, vars.bytes());
        let sharded = Sharded { optimizer, vars, _framework: framework };
        sharded.refresh()?;
        Ok(sharded)
    }

    /// Runs the backward pass of the step's last micro-batch, usually its only one, and hands over every variable's gradient. The
    /// loss is multiplied by the [loss scale](Optimizer::loss_scale) before.
    ///
    /// # Errors
    /// [`Error::LossShape`], [`Error::Written`], or [`Error::Candle`] of the backward pass; the step is then [`meshstep_shard::Error::Fault`] on every rank. [`Error::Shard`] of the
    /// micro-batch.
    pub fn backward<'a>(&mut self, pass: impl Into<BackwardPass<'a>>) -> Result<(), Error> {
        self.run(pass.into(), true)
    }

    /// Runs the backward pass of a micro-batch that is not the step's last ([`Optimizer::accumulate`]).
    pub fn accumulate<'a>(&mut self, pass: impl Into<BackwardPass<'a>>) -> Result<(), Error> {
        self.run(pass.into(), false)
    }

    /// Copies the optimizer's parameters into the variables: after a load into [`optimizer_mut`](Self::optimizer_mut).
    pub fn refresh(&self) -> Result<(), Error> {
        let inner = self.optimizer.optimizer();
        let threads = inner.options().queue.threads();
        self.vars.list.iter().try_for_each(|(name, var)| overwrite(name, var, inner.param(name)?, threads))
    }

    /// Returns the optimizer: parameters, state, options, communicator.
    pub fn optimizer(&self) -> &S {
        &self.optimizer
    }

    /// Returns the optimizer for calls between steps. After one that changes parameters, call [`refresh`](Self::refresh).
    pub fn optimizer_mut(&mut self) -> &mut S {
        &mut self.optimizer
    }

    /// Returns the variables with their names, in the optimizer's order.
    pub fn vars(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.vars.list.iter().map(|(name, var)| (&**name, var))
    }

    fn run(&mut self, pass: BackwardPass<'_>, last: bool) -> Result<(), Error> {
        let inner = self.optimizer.optimizer();
        let trains = self.vars.list.iter().map(|(name, _)| Ok(!inner.is_frozen(name)?));
        let trains = trains.collect::<Result<Vec<bool>, Error>>()?;
        let micro_batch = match last {
            true => self.optimizer.micro_batch(pass.weight),
            false => self.optimizer.accumulate(pass.weight),
        };
        let micro_batch = micro_batch.map_err(Error::of_step)?;
        // A micro-batch that an error drops unfinished makes the step an error on every rank.
        self.vars.check_unwritten(&micro_batch)?;
        pass.run(&self.vars, &trains, &micro_batch)?;
        Ok(micro_batch.finish()?)
    }
}

/// Refuses options that candle variables cannot have.
fn check(options: &Options) -> Result<(), Error> {
    match (options.stage, options.queue.place()) {
        (Stage::Zero3, _) => Err(Error::WholeVariables),
        (_, Place::Cpu) => Ok(()),
        (_, place) => Err(Error::QueuePlace { place }),
    }
}

/// Copies a variable's values into the optimizer's memory.
fn first_values(
    vars: &HashMap<&str, &Var>,
    param: &Param,
    mut out: SliceMut<'_>,
) -> Result<(), meshstep_tensor::Error> {
    let name = param.name();
    let copied = vars.get(name).map(|var| with_values(name, var, |values| out.copy_from(values)));
    assert!(
        matches!(copied, Some(Ok(_))),
        "variables are on the CPU and contiguous, and the layout names them"
    );
    copied.and_then(Result::ok).unwrap_or(Ok(()))
}
