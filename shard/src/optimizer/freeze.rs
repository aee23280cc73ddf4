//! Parameters that rest between two steps, and train again later.

use crate::config::selection::{Select, SelectParams};
use crate::optimizer::layout_state::ParamPlace;
use crate::{Error, Optimizer};
use meshstep_comm::name_calls;
use meshstep_tensor::Place as Memory;

impl Optimizer {
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
        let ready = self.finish_dropped().and_then(|()| self.check_heard()).and_then(|()| self.check_idle());
        let chosen = ready.and_then(|()| self.trainable(&params.select().0));
        let names = |chosen: &Vec<usize>| -> Vec<&str> {
            chosen.iter().map(|&p| self.entries[p].param.name()).collect()
        };
        let verb = if frozen { "freeze" } else { "unfreeze" };
        let call = format!("{verb} {:?}", chosen.as_ref().map(names).unwrap_or_default());
        self.call_together(&call, chosen.as_ref().map(drop).map_err(Error::clone))?;
        for p in chosen? {
            self.entries[p].paused = frozen;
            if let ParamPlace::Bucket { bucket, index, .. } = self.entries[p].place {
                self.reducer.freeze(bucket, index, frozen).map_err(|error| self.reducer.abort_with(error))?;
            }
        }
        Ok(())
    }

    /// Returns true if a parameter does not train: its layout or [`set_frozen`](Self::set_frozen) has frozen it.
    pub fn is_frozen(&self, name: &str) -> Result<bool, Error> {
        let entry = &self.entries[self.index(name)?];
        Ok(entry.paused || entry.param.frozen())
    }

    /// Returns the chosen parameters, each once, in registration order.
    fn trainable(&self, select: &Select) -> Result<Vec<usize>, Error> {
        if self.options.queue.place() != Memory::Cpu {
            let what = "freezing parameters between steps".to_owned();
            return Err(Error::NotOnGpu {
                what,
                works: "Missing::SkipIfMissingEverywhere, without their gradients",
            });
        }
        let mut chosen: Vec<usize> = match select {
            Select::Names(names) => names.iter().map(|name| self.index(name)).collect::<Result<_, _>>()?,
            Select::Where(predicate) => {
                let taken = |&p: &usize| !self.entries[p].param.frozen() && predicate(&self.entries[p].param);
                (0..self.entries.len()).filter(taken).collect()
            }
        };
        if let Some(&p) = chosen.iter().find(|&&p| self.entries[p].param.frozen()) {
            return Err(Error::FrozenParam { name: self.entries[p].param.name().to_owned() });
        }
        chosen.sort_unstable();
        chosen.dedup();
        Ok(chosen)
    }
}
