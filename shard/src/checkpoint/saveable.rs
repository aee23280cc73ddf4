//! Interface between an optimizer and its checkpoints: every parameter's vectors, and the elements of them on this rank.

use super::collective::compatibility::Fitting;
use super::collective::load::{Load, Read, read_own};
use super::error::CheckpointError;
use super::format::local_pieces::{LocalPieces, Part};
use super::format::manifest::{Manifest, Type};
use super::format::piece::{Piece, Region};
use super::format::placement::{ModelPlacement, shape};
use super::format::settings::Settings;
use super::store::reader::Saved;
use crate::update::params::ParamPlace;
use crate::update::values::VectorKind as Slot;
use crate::{Error, Optimizer, Stage};
use meshstep_comm::Communicator;
use meshstep_tensor::{DType, Queue, Slice, SliceMut};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Parameter and its state.
#[derive(Clone, Debug)]
pub(crate) struct SavedTensor {
    pub(crate) name: String,
    /// Number of updates of the parameter.
    pub(crate) t: u64,
    /// Local part of the parameter on this rank.
    pub(crate) holding: LocalPieces,
    /// Elements of the local part of which this rank has all vectors.
    pub(crate) owned: Range<usize>,
    /// True if other ranks have all vectors of the same elements.
    pub(crate) shared: bool,
    /// Its vectors.
    pub(crate) vectors: Vec<Named>,
}

/// Vector of a parameter.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    pub(crate) slot: Slot,
    /// `param`, `master`, `remainder`, or the name of the rule's state.
    pub(crate) name: String,
    pub(crate) dtype: Type,
}

pub(crate) const PARAM: &str = "param";
pub(crate) const MASTER: &str = "master";
pub(crate) const REMAINDER: &str = "remainder";

/// Part of a vector.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) param: usize,
    pub(crate) slot: Slot,
    /// Index among the parts that this rank writes.
    pub(crate) index: usize,
    pub(crate) part: &'a Part,
    /// Whole local part of the parameter.
    pub(crate) held: &'a Piece,
}

/// Receiver of values.
pub(crate) type Take<'a> = &'a mut dyn FnMut(Slice<'_>) -> Result<(), CheckpointError>;

/// Source of values to save: live vectors, or a copy of them.
pub(crate) trait Source {
    /// Returns the queue of the memory with the values.
    fn place(&self) -> Queue;

    /// Passes the values of a part to `take` in order, one call for each contiguous run.
    fn values(&mut self, wanted: &Wanted<'_>, take: Take<'_>) -> Result<(), CheckpointError>;
}

/// Access to live vectors.
pub(crate) trait Vectors {
    /// Returns the queue of the memory with the vectors.
    fn queue(&self) -> Queue;

    /// Returns the local elements of a vector of parameter `param`, and the index of the first of them in the rank's local part.
    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), Error>;
}

/// Type that can be saved and loaded: an optimizer, or a wrapper with state of its own.
pub(crate) trait Saveable: Vectors {
    fn optimizer(&mut self) -> &mut Optimizer;

    /// Returns every parameter, in the same order on all ranks.
    fn contents(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError>;

    /// Returns the communicator of the ranks that save and load together.
    fn ranks(&mut self) -> Arc<dyn Communicator> {
        Arc::clone(self.optimizer().comm())
    }

    /// Returns the default name of a checkpoint: the number of steps so far.
    fn name_by_steps(&mut self) -> u64 {
        self.optimizer().steps()
    }

    /// [`Optimizer::call_together`] on all ranks of [`ranks`](Self::ranks).
    fn call_all(&mut self, what: &str, ready: Result<(), Error>) -> Result<(), Error> {
        self.optimizer().reducer.call_together(what, ready).map(drop)
    }

    /// Checks that ranks with copies of the same state agree on it. Collective.
    fn compare_all(&mut self) -> Result<(), Error> {
        let opt = self.optimizer();
        let counters = opt.describe_counters()?;
        crate::same_everywhere(&**opt.comm(), opt.options(), &counters)
    }

    /// [`Optimizer::end_if_alone`] on all ranks of [`ranks`](Self::ranks).
    fn end_all<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        self.optimizer().reducer.end_if_alone(result)
    }

    /// Selects the part of a saved step to load; [`contents`](Self::contents) describes that part from then on.
    fn choose<'m>(&mut self, manifest: &'m Manifest, _: &Load) -> Result<Cow<'m, Manifest>, CheckpointError> {
        Ok(Cow::Borrowed(manifest))
    }

    /// Reads everything that this rank needs of a saved step.
    fn read(
        &mut self,
        saved: &Saved,
        contents: &[SavedTensor],
        fitting: &Fitting<'_>,
    ) -> Result<Vec<Read>, CheckpointError>
    where
        Self: Sized,
    {
        read_own(self, saved, contents, fitting)
    }

    /// Sets the number of updates of each parameter; `None` leaves it as it is.
    fn set_updates(&mut self, t: &[Option<u64>]) {
        for (entry, t) in self.optimizer().params.entries.iter_mut().zip(t) {
            entry.t = t.unwrap_or(entry.t);
        }
    }

    /// Returns the memory of [`vector`](Vectors::vector) for writing.
    fn vector_mut(&mut self, param: usize, slot: Slot) -> Result<SliceMut<'_>, Error>;

    fn settings(&self, tied: BTreeMap<String, String>) -> Settings;

    /// Checks that [`take_in`](Self::take_in) accepts these settings.
    fn check(&self, _: &Settings) -> Result<(), CheckpointError> {
        Ok(())
    }

    /// Resumes from `settings`, after the vectors have been written.
    fn take_in(&mut self, settings: &Settings) -> Result<(), Error>;
}

impl<V: Vectors> Source for V {
    fn place(&self) -> Queue {
        self.queue()
    }

    fn values(&mut self, wanted: &Wanted<'_>, take: Take<'_>) -> Result<(), CheckpointError> {
        let (first, values) = self.vector(wanted.param, wanted.slot).map_err(CheckpointError::memory)?;
        for run in wanted.part.local.runs(wanted.held) {
            let start = (run.to as usize) - first;
            take(values.slice(start..start + run.len as usize).map_err(CheckpointError::memory)?)?;
        }
        Ok(())
    }
}

impl Vectors for Optimizer {
    fn queue(&self) -> Queue {
        self.params.options.queue.clone()
    }

    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), Error> {
        self.params.vector(param, slot)
    }
}

impl Saveable for Optimizer {
    fn optimizer(&mut self) -> &mut Optimizer {
        self
    }

    fn contents(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError> {
        (0..self.params.entries.len()).map(|param| self.content(param, placing)).collect()
    }

    fn vector_mut(&mut self, param: usize, slot: Slot) -> Result<SliceMut<'_>, Error> {
        self.params.vector_mut(param, slot)
    }

    fn settings(&self, tied: BTreeMap<String, String>) -> Settings {
        Settings::of(self, tied)
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        let own = self.settings(BTreeMap::new());
        let (Some(rule), Some(state)) = (&self.params.options.loss_scale, settings.scale()) else {
            return Ok(());
        };
        match rule.check_state(&state) {
            Err(error) if settings.loss_scale_rule == own.loss_scale_rule => {
                let (what, reason) = ("the loss scale".to_owned(), error.to_string());
                Err(CheckpointError::Contradiction { what, reason })
            }
            _ => Ok(()),
        }
    }

    fn take_in(&mut self, settings: &Settings) -> Result<(), Error> {
        let progress = &mut self.decider.progress;
        progress.steps = settings.steps.unwrap_or(progress.steps);
        (progress.skips, progress.skips_at_min_scale) = (settings.skips, settings.skips_at_min_scale);
        if let (Some(rule), Some(state)) = (&self.params.options.loss_scale, settings.scale()) {
            // The state may be of another rule; then the loss scale stays as it is.
            progress.loss_scale = rule.check_state(&state).map(|()| state).ok().or(progress.loss_scale);
        }
        self.publish_counters()?;
        self.verifier.last = None;
        self.keep_if_due()
    }
}

impl SavedTensor {
    /// Returns the local part as one piece.
    pub(crate) fn held(&self) -> Piece {
        let region = Region::whole(&self.holding.local);
        Piece { range: 0..region.elements().unwrap_or(0), region }
    }

    /// Returns the number of elements of the whole parameter.
    pub(crate) fn len(&self) -> u64 {
        self.holding.shape.iter().product()
    }
}

impl Optimizer {
    /// Describes a parameter and its state.
    fn content(&self, param: usize, placing: &dyn ModelPlacement) -> Result<SavedTensor, CheckpointError> {
        let entry = &self.params.entries[param];
        let (name, t) = (entry.param.name().to_owned(), entry.t);
        let holding = placing.holding(&entry.param);
        if holding.local != shape(&entry.param) {
            let reason = format!("its local shape is {:?}, not {:?}", holding.local, entry.param.shape());
            return Err(CheckpointError::Contradiction { what: format!("parameter {name:?}"), reason });
        }
        let named = |slot, name: &str, dtype: DType| match Type::of(dtype) {
            Some(dtype) => Ok(Named { slot, name: name.to_owned(), dtype }),
            None => Err(CheckpointError::memory(format!("{dtype} is not saved"))),
        };
        let mut vectors = vec![named(Slot::Params, PARAM, entry.param.dtype())?];
        let ParamPlace::Bucket { bucket, range, .. } = &entry.place else {
            return Ok(SavedTensor { name, t, holding, owned: 0..entry.param.len(), shared: true, vectors });
        };
        let owned = &self.params.buckets[*bucket];
        if let Some(master) = owned.master() {
            let name = if master.dtype() == DType::U16 { REMAINDER } else { MASTER };
            vectors.push(named(Slot::Master, name, master.dtype())?);
        }
        for (i, (state, of)) in
            self.params.groups[entry.group].rule.state().iter().zip(owned.state()).enumerate()
        {
            vectors.push(named(Slot::State(i), state, of.dtype())?);
        }
        let owned = owned.part_of(range).map_or(0..0, |(within, ..)| within);
        let shared = self.params.options.stage == Stage::Replicated;
        Ok(SavedTensor { name, t, holding, owned, shared, vectors })
    }
}
