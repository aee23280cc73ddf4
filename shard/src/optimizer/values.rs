//! Values of parameters: read, gathered by unit, evaluated, frozen.

use crate::config::selection::{Select, SelectParams};
use crate::error::Error;
use crate::gather::unit_gather::{Gathered, PendingGather};
use crate::optimizer::Optimizer;
use crate::update::evaluation::TrainedValues;
use crate::update::params::ParamPlace;
use crate::update::values::ParamState;
use meshstep_comm::name_calls;
use meshstep_tensor::{Place, Slice, SliceMut};

impl Optimizer {
    /// Returns the values of a parameter; at [`Stage::Zero3`](crate::Stage::Zero3) of a frozen one only, because the others are
    /// sharded. On a GPU later work on the options' queue sees the values of the last step: call this again after each step.
    pub fn param(&self, name: &str) -> Result<Slice<'_>, Error> {
        self.params.param(name)
    }

    /// Returns this rank's part of a parameter and its state: the elements it updates, none of a frozen parameter. On a GPU it
    /// waits for the steps so far. [`Error::Evaluating`] during an evaluation, whose parameters and masters are not the trained ones.
    pub fn state(&self, name: &str) -> Result<ParamState<'_>, Error> {
        self.reducer.check_training()?;
        let param = self.params.index(name)?;
        let mut state = self.params.state(param)?;
        if !self.params.entries[param].param.frozen() {
            state.t += self.decider.launched.updates_of(param)?;
        }
        Ok(state)
    }

    /// Writes the values of a whole parameter into `out`, which has its length and type and is on the CPU or at the place of
    /// [`Options::queue`](crate::Options::queue). On a GPU the queue orders the copy, and the host waits for a copy to the CPU.
    ///
    /// At [`Stage::Zero3`](crate::Stage::Zero3) collective, between two steps, over all ranks that step together: they read the
    /// same parameter. An argument that is wrong on one rank is an error on every rank, and changes nothing. The parameter's unit
    /// is [gathered](Self::gather) and dropped again. At other stages a rank copies its own values, and no other rank takes part.
    ///
    /// ```
    /// use meshstep_shard::prelude::*;
    ///
    /// let read = loopback::spawn(4, |comm| -> Result<Vec<f32>, meshstep_shard::Error> {
    ///     let layout = Layout::builder().param("w", &[3], DType::F32).build()?;
    ///     let options = Options { stage: Stage::Zero3, ..Options::default() };
    ///     let ones = |_: &Param, mut w: SliceMut| w.copy_from((&[1f32, 2.0, 3.0]).into());
    ///     let mut opt = Optimizer::new(comm, layout, AdamW::default(), ones, options)?;
    ///     let mut w = vec![0f32; 3];
    ///     opt.read("w", &mut w)?;
    ///     Ok(w)
    /// })?;
    /// assert!(read.into_iter().all(|w| w.is_ok_and(|w| w == [1.0, 2.0, 3.0])));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn read<'o>(&mut self, name: &str, out: impl Into<SliceMut<'o>>) -> Result<(), Error> {
        let _name = name_calls("Optimizer::read");
        let out = out.into();
        let param = self.params.readable(name, &out);
        if !self.params.options.stage.cuts_params() {
            return self.params.copy_out(self.params.values(param?)?, out);
        }
        self.reducer.healthy()?;
        let ready = self.reducer.finish_dropped().and_then(|()| self.check_outcomes());
        let param = ready.and_then(|()| self.reducer.check_no_step()).and(param);
        let call = param.as_ref().map_or(String::new(), |&p| format!("read {:?}", self.params.name(p)));
        self.reducer.call_together(&call, param.as_ref().map(drop).map_err(Error::clone))?;
        let param = param?;
        self.apart_from_steps(|all| all.copy_whole(param, name, out)).map(drop)
    }

    /// Copies a whole parameter to the caller, once its unit is gathered. Collective.
    fn copy_whole(&self, param: usize, name: &str, out: SliceMut<'_>) -> Result<(), Error> {
        let params = &self.params;
        match params.units.of(param).filter(|_| !params.entries[param].param.frozen()) {
            Some(unit) => {
                let gathered = self.gather(params.units.name(unit))?;
                params.copy_out(gathered.param(name)?, out)
            }
            None => params.copy_out(params.values(param)?, out),
        }
    }

    /// Returns the units' names, in the order a forward pass gathers them: those of the layouts
    /// ([`LayoutBuilder::unit`](meshstep_tensor::LayoutBuilder::unit)). Each bucket of parameters before a layout's first unit is
    /// a unit too, named after its first parameter.
    pub fn units(&self) -> impl Iterator<Item = &str> {
        self.params.units.names()
    }

    /// Returns the name of a parameter's unit; `None` for a frozen parameter outside every unit.
    pub fn unit_of(&self, name: &str) -> Result<Option<&str>, Error> {
        let units = &self.params.units;
        Ok(units.of(self.params.index(name)?).map(|unit| units.name(unit)))
    }

    /// Gathers a unit's parameters on this rank. Collective at [`Stage::Zero3`](crate::Stage::Zero3), over the ranks that divide
    /// the unit: they gather the same units in the same order, each from one thread, and between two gathers hand over the
    /// gradients of the same parameters, in any order. If one rank lacks some, others may wait for
    /// [`Options::wait_budget`](crate::Options::wait_budget) before they gather. Ranks that gather different units get an error here if
    /// the lengths differ, else from the next step. Ranks that wait for a gather get an error when another rank ends its
    /// micro-batch without it, if communicators compare calls, else at the deadline.
    ///
    /// A unit named after a parameter can be gathered by that parameter's other names too ([`also_called`](Self::also_called)).
    ///
    /// There is memory for any two consecutive units in the order of [`units`](Self::units), counted in
    /// [`Memory::gathered`](crate::Memory::gathered); a third unit, or another pair that is longer, allocates temporarily. A
    /// gathered unit cannot be gathered again before it is dropped.
    ///
    /// ```
    /// # use meshstep_optim::AdamW;
    /// # use meshstep_shard::{StepArgs, Optimizer, Options, Stage};
    /// # use meshstep_tensor::{DType, Layout};
    /// # meshstep_comm::loopback::spawn(4, |comm| -> Result<(), meshstep_shard::Error> {
    /// let layout = Layout::builder().unit("h.0").param("h.0.w", &[64, 64], DType::F32);
    /// let layout = layout.unit("h.1").param("h.1.w", &[64, 64], DType::F32).build()?;
    /// let options = Options { stage: Stage::Zero3, ..Options::default() };
    /// let mut opt = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), options)?;
    /// let mb = opt.micro_batch(1)?;
    /// let last = mb.gather("h.1")?; // the backward pass begins with the last block
    /// let next = mb.start_gather("h.0")?; // in flight meanwhile
    /// mb.grad("h.1.w", last.param("h.1.w")?)?; // the gradient of |w|^2 / 2
    /// drop(last); // freed
    /// let first = next.wait()?;
    /// mb.grad("h.0.w", first.param("h.0.w")?)?;
    /// drop(first);
    /// mb.finish()?;
    /// opt.step(StepArgs::default())?.outcome()?;
    /// # Ok(())
    /// # })?.into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn gather(&self, unit: &str) -> Result<Gathered<'_>, Error> {
        self.start_gather(unit)?.wait()
    }

    /// Starts to gather a unit, which is in flight while the caller computes with the previous unit.
    pub fn start_gather(&self, unit: &str) -> Result<PendingGather<'_>, Error> {
        let _name = name_calls("Optimizer::gather");
        self.units_from().start(unit)
    }

    /// Takes the parameters to where the model is evaluated, until [`end_evaluation`](Self::end_evaluation). Collective, between two
    /// steps; does nothing if they are there.
    ///
    /// A rule such as [`ScheduleFreeAdamW`](meshstep_optim::ScheduleFreeAdamW) trains parameters at another point than it evaluates
    /// ([`Rule::evaluation`](meshstep_optim::Rule::evaluation)). Each rank converts what it owns, and the parameters are gathered; at stage 3 units are gathered as
    /// before, with the values to evaluate. With other rules the values stay.
    ///
    /// Meanwhile [`param`](Self::param), [`read`](Self::read) and [`gather`](Self::gather) return the values to evaluate, and every
    /// call that would change, save or compare values is [`Error::Evaluating`]: a checkpoint holds the trained parameters. Each rank
    /// keeps a copy of its own trained parameters and masters, which returns with its bits: at stage 0 the bytes of
    /// all parameters and masters, else this rank's share of them.
    ///
    /// ```
    /// use meshstep_shard::prelude::*;
    ///
    /// let ranks = loopback::spawn(2, |comm| -> Result<[f32; 3], meshstep_shard::Error> {
    ///     let layout = Layout::builder().param("w", &[64], DType::F32).build()?;
    ///     let options = Options { stage: Stage::Zero2, ..Options::default() };
    ///     let mut opt = Optimizer::new(comm, layout, ScheduleFreeAdamW::default(), |_, _| Ok(()), options)?;
    ///     for _ in 0..3 {
    ///         let mb = opt.micro_batch(1)?;
    ///         mb.grad("w", &[1f32; 64])?;
    ///         mb.finish()?;
    ///         opt.step(StepArgs { lr: 0.1, ..StepArgs::default() })?.outcome()?;
    ///     }
    ///     let first = |opt: &Optimizer| Ok::<_, meshstep_shard::Error>(opt.param("w")?.typed::<f32>()?[0]);
    ///     let trained = first(&opt)?;
    ///     opt.begin_evaluation()?;
    ///     let average = first(&opt)?; // run the model on held-out data here
    ///     assert!(matches!(opt.micro_batch(1), Err(meshstep_shard::Error::Evaluating)));
    ///     opt.end_evaluation()?;
    ///     Ok([trained, average, first(&opt)?])
    /// })?;
    /// for rank in ranks {
    ///     let [trained, average, back] = rank?;
    ///     assert!((average + 0.2).abs() < 1e-6 && trained < average && trained == back);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn begin_evaluation(&mut self) -> Result<(), Error> {
        let _name = name_calls("Optimizer::begin_evaluation");
        self.reducer.healthy()?;
        if self.is_evaluating() {
            return Ok(());
        }
        // Memory is allocated before the ranks agree, so that a rank without memory is an error on all of them.
        let ready = self.check_between_steps().and_then(|()| TrainedValues::copied(&self.params));
        let told = ready.as_ref().map(drop).map_err(Error::clone);
        self.reducer.call_together("begin an evaluation", told)?;
        let mut trained = ready?;
        self.apart_from_steps(|all| {
            // On a GPU the rows are another rule's, before and after.
            all.decider.recount(&mut all.params);
            let left = trained.leave(&mut all.params);
            all.decider.recount(&mut all.params);
            left?;
            all.gatherer.gather_all(&mut all.params, &all.reducer)
        })?;
        self.trained = Some(trained);
        self.reducer.progress.evaluating = true;
        Ok(())
    }

    /// Takes the parameters back to where they are trained, with the bits that they had there. Collective; does nothing if they are
    /// there.
    pub fn end_evaluation(&mut self) -> Result<(), Error> {
        let _name = name_calls("Optimizer::end_evaluation");
        self.reducer.healthy()?;
        if !self.is_evaluating() {
            return Ok(());
        }
        self.reducer.call_together("end an evaluation", Ok(()))?;
        let trained = self.trained.take();
        self.apart_from_steps(|all| {
            trained.as_ref().map_or(Ok(()), |trained| trained.come_back(&mut all.params))?;
            all.gatherer.gather_all(&mut all.params, &all.reducer)
        })?;
        self.reducer.progress.evaluating = false;
        Ok(())
    }

    /// Returns true between [`begin_evaluation`](Self::begin_evaluation) and [`end_evaluation`](Self::end_evaluation).
    pub fn is_evaluating(&self) -> bool {
        self.reducer.progress.evaluating
    }

    /// Freezes parameters, or lets them train again: those of a list of names, or those for which a predicate `|p: &Param| ...` is
    /// true. Collective, between two steps; ranks that name different parameters get an error, which changes nothing.
    ///
    /// A frozen parameter takes no gradient: handing one over is [`Error::FrozenParam`]. Its values, state and `t` stay, weight
    /// decay included; it counts as zeros in the norm, and once it trains again its state continues. Memory and checkpoints stay
    /// as they are: a loaded optimizer freezes its parameters again. A bucket with frozen parameters alone is not sent.
    ///
    /// Parameters that the layout declares [frozen](meshstep_tensor::LayoutBuilder::frozen) have no state and stay frozen; naming
    /// one is an error. Works on the CPU.
    ///
    /// ```
    /// use meshstep_shard::prelude::*;
    ///
    /// loopback::spawn(2, |comm| -> Result<(), meshstep_shard::Error> {
    ///     let layout = Layout::builder().param("trunk", &[4], DType::F32).param("head", &[2], DType::F32).build()?;
    ///     let mut opt = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), Options::default())?;
    ///     opt.set_frozen(["trunk"], true)?;
    ///     let mb = opt.micro_batch(1)?;
    ///     mb.grad("head", &[1f32, -1.0])?; // the only gradient of this step
    ///     mb.finish()?;
    ///     opt.step(StepArgs::default())?.outcome()?;
    ///     opt.set_frozen(|p: &Param| p.name() == "trunk", false)
    /// })?.into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_frozen<By>(&mut self, params: impl SelectParams<By>, frozen: bool) -> Result<(), Error> {
        let _name = name_calls("Optimizer::set_frozen");
        self.reducer.healthy()?;
        let chosen = self.check_between_steps().and_then(|()| self.trainable(&params.select().0));
        let names = |chosen: &Vec<usize>| -> Vec<&str> {
            chosen.iter().map(|&p| self.params.entries[p].param.name()).collect()
        };
        let verb = if frozen { "freeze" } else { "unfreeze" };
        let call = format!("{verb} {:?}", chosen.as_ref().map(names).unwrap_or_default());
        self.reducer.call_together(&call, chosen.as_ref().map(drop).map_err(Error::clone))?;
        for p in chosen? {
            let entry = &mut self.params.entries[p];
            entry.paused = frozen;
            if let ParamPlace::Bucket { bucket, index, .. } = entry.place {
                self.reducer.freeze(bucket, index, frozen).map_err(|error| self.reducer.abort_with(error))?;
            }
        }
        Ok(())
    }

    /// Returns true if a parameter does not train: its layout or [`set_frozen`](Self::set_frozen) has frozen it.
    pub fn is_frozen(&self, name: &str) -> Result<bool, Error> {
        Ok(self.params.entries[self.params.index(name)?].rests())
    }

    /// Returns the chosen parameters, each once, in registration order.
    fn trainable(&self, select: &Select) -> Result<Vec<usize>, Error> {
        if self.params.options.queue.place() != Place::Cpu {
            let what = "freezing parameters between steps".to_owned();
            let works = "Missing::SkipIfMissingEverywhere, without their gradients";
            return Err(Error::NotOnGpu { what, works });
        }
        let entries = &self.params.entries;
        let mut chosen: Vec<usize> = match select {
            Select::Names(names) => {
                names.iter().map(|name| self.params.index(name)).collect::<Result<_, _>>()?
            }
            Select::Where(predicate) => {
                let taken = |&p: &usize| !entries[p].param.frozen() && predicate(&entries[p].param);
                (0..entries.len()).filter(taken).collect()
            }
        };
        if let Some(&p) = chosen.iter().find(|&&p| entries[p].param.frozen()) {
            return Err(Error::FrozenParam { name: self.params.name(p) });
        }
        chosen.sort_unstable();
        chosen.dedup();
        Ok(chosen)
    }
}
