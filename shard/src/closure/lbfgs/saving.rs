//! Checkpoints of L-BFGS: its vectors are kept by rank, and saved by parameter.

use super::ShardedLbfgs;
use crate::checkpoint::{
    CheckpointError, Load, Loaded, ModelPlacement, Moved, Named, Save, Saveable, SavedTensor, Saving,
    Settings, Sink, Store, Type, Unsharded, Vectors, consolidate_all, deserialize_all, load_all, reshard_all,
    save_all, save_all_async, serialize_all,
};
use crate::update::params::ParamPlace;
use crate::update::values::VectorKind as Slot;
use crate::{Error, Optimizer};
use meshstep_comm::Communicator;
use meshstep_tensor::{Queue, Slice, SliceMut};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;
use std::sync::Arc;

impl ShardedLbfgs {
    /// [`Optimizer::save`] of parameters and history: the directions `d0`, .., and `y0`, .., the gradients `g0`, .., and the point `x`. By
    /// default the checkpoint is named by the iterations so far.
    pub fn save(&mut self, store: &Store, save: Save<'_>) -> Result<u64, Error> {
        let placing = self.alike();
        self.save_placed(store, save, &placing)
    }

    /// [`save`](Self::save) with parameters cut as `placing` describes.
    pub fn save_placed(
        &mut self,
        store: &Store,
        save: Save<'_>,
        placing: &dyn ModelPlacement,
    ) -> Result<u64, Error> {
        save_all(self, store, save, placing)
    }

    /// [`Optimizer::save_async`] of parameters and history.
    pub fn save_async(&mut self, store: &Store, save: Save<'_>) -> Result<Saving, Error> {
        let placing = self.alike();
        self.save_async_placed(store, save, &placing)
    }

    /// [`save_async`](Self::save_async) with parameters cut as `placing` describes.
    pub fn save_async_placed(
        &mut self,
        store: &Store,
        save: Save<'_>,
        placing: &dyn ModelPlacement,
    ) -> Result<Saving, Error> {
        save_all_async(self, store, save, placing)
    }

    /// [`Optimizer::load`] of parameters and history; later steps are the same as without the interruption.
    pub fn load(&mut self, store: &Store, load: Load) -> Result<Loaded, Error> {
        let placing = self.alike();
        self.load_placed(store, load, &placing)
    }

    /// [`load`](Self::load) with parameters cut as `placing` describes.
    pub fn load_placed(
        &mut self,
        store: &Store,
        load: Load,
        placing: &dyn ModelPlacement,
    ) -> Result<Loaded, Error> {
        load_all(self, store, load, placing)
    }

    /// [`Optimizer::serialize`] of parameters and history.
    pub fn serialize(&mut self) -> Result<Vec<u8>, Error> {
        let placing = self.alike();
        self.serialize_placed(&placing)
    }

    /// [`serialize`](Self::serialize) with parameters cut as `placing` describes.
    pub fn serialize_placed(&mut self, placing: &dyn ModelPlacement) -> Result<Vec<u8>, Error> {
        serialize_all(self, placing)
    }

    /// [`Optimizer::deserialize`] of parameters and history; later steps are the same as without the interruption.
    pub fn deserialize(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let placing = self.alike();
        self.deserialize_placed(bytes, &placing)
    }

    /// [`deserialize`](Self::deserialize) with parameters cut as `placing` describes.
    pub fn deserialize_placed(&mut self, bytes: &[u8], placing: &dyn ModelPlacement) -> Result<(), Error> {
        deserialize_all(self, bytes, placing)
    }

    /// [`Optimizer::consolidate`] of parameters and history, by the names that [`save`](Self::save) gives.
    pub fn consolidate(&mut self, to: usize, sink: Sink<'_>) -> Result<(), Error> {
        let placing = self.alike();
        self.consolidate_placed(to, sink, &placing)
    }

    /// [`consolidate`](Self::consolidate) with parameters cut as `placing` describes.
    pub fn consolidate_placed(
        &mut self,
        to: usize,
        sink: Sink<'_>,
        placing: &dyn ModelPlacement,
    ) -> Result<(), Error> {
        consolidate_all(self, to, sink, placing)
    }

    /// [`reshard`](crate::checkpoint::reshard) of parameters and history; later steps on `to` are the same as without the move.
    pub fn reshard(
        via: &Arc<dyn Communicator>,
        from: Option<&mut Self>,
        to: Option<&mut Self>,
    ) -> Result<Moved, Error> {
        let places = [from.as_deref().map(Self::alike), to.as_deref().map(Self::alike)];
        let [old, new] =
            places.each_ref().map(|place| place.as_ref().map(|alike| alike as &dyn ModelPlacement));
        reshard_all(via, from.zip(old), to.zip(new))
    }

    fn alike(&self) -> Unsharded {
        Unsharded { ranks: self.optimizer().comm().world_size() }
    }

    /// Returns this rank's part of a parameter, and its range in the rank's vectors.
    fn part(&self, param: usize) -> (usize, Range<usize>) {
        let ParamPlace::Bucket { bucket, range, .. } = &self.opt.params.entries[param].place else {
            return (0, 0..0);
        };
        let first = self.spread.first(*bucket);
        let part = self.opt.params.buckets[*bucket].part_of(range);
        part.map_or((0, 0..0), |(within, kept, _)| (within.start, first + kept.start..first + kept.end))
    }

    fn rule_text(&self) -> String {
        let mut text = "lbfgs".to_owned();
        for (name, value) in self.rule.hyperparameters() {
            let _ = write!(text, " {name}={value}");
        }
        text
    }
}

/// Among the vectors of L-BFGS the first is the point, and the others are the history.
impl Vectors for ShardedLbfgs {
    fn queue(&self) -> Queue {
        self.opt.queue()
    }

    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), Error> {
        let Slot::State(i) = slot else { return self.opt.vector(param, slot) };
        let (first, part) = self.part(param);
        let vector = match i.checked_sub(1) {
            None => Some(self.x.as_slice()),
            Some(i) => self.state.vectors().nth(i).map(|(_, vector)| vector),
        };
        vector.map_or(Ok((0, Slice::from(&[] as &[f32]))), |vector| Ok((first, vector.slice(part)?)))
    }
}

impl Saveable for ShardedLbfgs {
    fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.opt
    }

    fn contents(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError> {
        let mut contents = self.opt.contents(placing)?;
        let Some(dtype) = Type::of(self.x.dtype()) else { return Ok(contents) };
        let trains = |param: usize| !self.opt.params.entries[param].param.frozen();
        for (_, content) in contents.iter_mut().enumerate().filter(|(param, _)| trains(*param)) {
            let names = self.state.vectors().map(|(name, _)| name);
            let names = std::iter::once("x".to_owned()).chain(names);
            let named = names.enumerate().map(|(i, name)| Named { slot: Slot::State(i), name, dtype });
            content.vectors.extend(named);
        }
        Ok(contents)
    }

    fn vector_mut(&mut self, param: usize, slot: Slot) -> Result<SliceMut<'_>, Error> {
        let Slot::State(i) = slot else { return self.opt.vector_mut(param, slot) };
        let (_, part) = self.part(param);
        let vector = match i.checked_sub(1) {
            None => Some(self.x.as_mut()),
            Some(i) => self.state.vectors_mut().nth(i).map(|(_, vector)| vector),
        };
        let nothing = SliceMut::empty(self.spread.dtype(), self.opt.params.options.queue.place());
        vector.map_or(Ok(nothing), |vector| Ok(vector.slice(part)?))
    }

    fn settings(&self, tied: BTreeMap<String, String>) -> Settings {
        Settings { lbfgs: Some((self.rule_text(), self.state.words())), ..self.opt.settings(tied) }
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        self.opt.check(settings)?;
        let Some((_, words)) = &settings.lbfgs else { return Ok(()) };
        self.state.check(words).map_err(|error| CheckpointError::Contradiction {
            what: "the progress of L-BFGS".to_owned(),
            reason: error.to_string(),
        })
    }

    fn take_in(&mut self, settings: &Settings) -> Result<(), Error> {
        match &settings.lbfgs {
            Some((_, words)) => self.state.restore(words)?,
            // A history recorded at other parameter values would mislead L-BFGS.
            None => {
                self.state.reset();
                self.spread.read_params(&self.opt, self.x.as_mut())?;
            }
        }
        self.opt.take_in(settings)
    }
}
