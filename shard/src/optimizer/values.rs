//! Values and state of each parameter on this rank.

use crate::optimizer::layout_state::ParamPlace;
use crate::{Error, Optimizer, UnitError};
use meshstep_tensor::{Param, Slice};
use std::ops::Range;

/// This rank's part of one parameter, and of its state.
#[derive(Clone, Debug)]
pub struct ParamState<'a> {
    /// Elements of the parameter, in row-major order; empty if another rank owns all of them.
    pub range: Range<usize>,
    /// Values of the elements, as the model reads them.
    pub values: Slice<'a>,
    /// State vectors of the rule by name, each as long as `range`; none if that is empty.
    pub slots: Vec<(&'static str, Slice<'a>)>,
    /// The f32 master values, or the remainders (u16), if there are any: [`meshstep_optim::remainder::join_all`] joins those with
    /// `values` to masters.
    pub master: Option<Slice<'a>>,
    /// Number of the parameter's updates.
    pub t: u64,
}

impl Optimizer {
    /// Returns the values of a parameter; at [`Stage::Zero3`](crate::Stage::Zero3) of a frozen one only, because the others are
    /// sharded. On a GPU later work on the options' queue sees the values of the last step: call this again after each step.
    pub fn param(&self, name: &str) -> Result<Slice<'_>, Error> {
        let param = self.index(name)?;
        if self.options.stage.cuts_params() && !self.entries[param].param.frozen() {
            let unit = self.units.of(param).map_or(String::new(), |unit| self.units.name(unit).to_owned());
            return Err(UnitError::Sharded { name: name.to_owned(), unit }.into());
        }
        self.values(param)
    }

    /// Returns the values of a parameter that is whole on this rank.
    pub(crate) fn values(&self, param: usize) -> Result<Slice<'_>, Error> {
        Ok(match &self.entries[param].place {
            ParamPlace::Bucket { bucket, range, .. } => {
                self.buckets[*bucket].params()?.slice(range.clone())?
            }
            ParamPlace::Frozen { vector, range } => self.frozen[*vector].as_slice().slice(range.clone())?,
        })
    }

    /// Returns this rank's part of a parameter and its state: the elements it updates, none of a frozen parameter. On a GPU it
    /// waits for the steps so far.
    pub fn state(&self, name: &str) -> Result<ParamState<'_>, Error> {
        let param = self.index(name)?;
        let entry = &self.entries[param];
        let nothing = match &entry.place {
            ParamPlace::Bucket { bucket, .. } => self.buckets[*bucket].params()?.slice(0..0)?,
            ParamPlace::Frozen { vector, .. } => self.frozen[*vector].as_slice().slice(0..0)?,
        };
        let mut state =
            ParamState { range: 0..0, values: nothing, slots: Vec::new(), master: None, t: entry.t };
        #[cfg(feature = "cuda")]
        if !entry.param.frozen() {
            state.t += self.unheard_updates(param)?;
        }
        let ParamPlace::Bucket { bucket, range, .. } = &entry.place else { return Ok(state) };
        let owned = &self.buckets[*bucket];
        let Some((within, kept, here)) = owned.part_of(range) else { return Ok(state) };
        for (slot, values) in self.groups[entry.group].rule.state().iter().zip(owned.state()) {
            state.slots.push((slot, values.as_slice().slice(kept.clone())?));
        }
        state.master = owned.master().map(|m| m.as_slice().slice(kept)).transpose()?;
        state.values = owned.params()?.slice(here)?;
        state.range = within;
        Ok(state)
    }

    /// Returns all parameters, in registration order.
    pub fn params(&self) -> impl Iterator<Item = &Param> {
        self.entries.iter().map(|e| &e.param)
    }
}
