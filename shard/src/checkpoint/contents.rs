//! What there is of an optimizer to save and to load: every parameter's vectors, and which elements of them this rank has.

use super::error::CheckpointError;
use super::holding::{Holding, Part};
use super::manifest::Type;
use super::piece::{Piece, Region};
use super::placing::{Placing, shape};
use crate::family::Place;
use crate::verify::{Item, Slot};
use crate::{Error, Optimizer};
use meshstep_tensor::{DType, Queue, Slice, SliceMut};
use std::ops::Range;

/// A parameter and its state.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    pub(crate) name: String,
    /// Updates it has seen.
    pub(crate) t: u64,
    /// What this rank holds of it.
    pub(crate) holding: Holding,
    /// What this rank has all vectors of, in what it holds.
    pub(crate) owned: Range<usize>,
    /// Its vectors.
    pub(crate) vectors: Vec<Named>,
}

/// One of a parameter's vectors.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    pub(crate) slot: Slot,
    /// `param`, `master`, `remainder`, or what the rule calls it.
    pub(crate) name: String,
    pub(crate) dtype: Type,
}

pub(super) const PARAM: &str = "param";
pub(super) const MASTER: &str = "master";
pub(super) const REMAINDER: &str = "remainder";

/// A part of one of a parameter's vectors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) param: usize,
    pub(crate) slot: Slot,
    /// Its number among the parts that this rank writes.
    pub(crate) index: usize,
    pub(crate) part: &'a Part,
    /// What the rank holds of the parameter.
    pub(crate) held: &'a Piece,
}

/// Where vectors are read from: an optimizer, or a copy of one.
pub(crate) trait Vectors {
    /// Whose memory they are in.
    fn queue(&self) -> Queue;

    /// Hands over the values of a part in its order, as many at a time as lie together.
    fn values(&mut self, wanted: &Wanted<'_>, take: Take<'_>) -> Result<(), CheckpointError>;
}

/// Where values go.
pub(crate) type Take<'a> = &'a mut dyn FnMut(Slice<'_>) -> Result<(), CheckpointError>;

impl Vectors for Optimizer {
    fn queue(&self) -> Queue {
        self.options.queue.clone()
    }

    fn values(&mut self, wanted: &Wanted<'_>, take: Take<'_>) -> Result<(), CheckpointError> {
        let item = Item { param: wanted.param, slot: wanted.slot, group: None };
        let (first, values) = self.piece(&item).map_err(CheckpointError::memory)?;
        for run in wanted.part.local.runs(wanted.held) {
            let start = (run.to as usize) - first;
            take(values.slice(start..start + run.len as usize).map_err(CheckpointError::memory)?)?;
        }
        Ok(())
    }
}

impl Content {
    /// What this rank holds, as one piece.
    pub(super) fn held(&self) -> Piece {
        let region = Region::whole(&self.holding.local);
        Piece { range: 0..region.elements().unwrap_or(0), region }
    }

    /// Elements of the whole parameter.
    pub(super) fn len(&self) -> u64 {
        self.holding.shape.iter().product()
    }
}

impl Optimizer {
    /// Every parameter, in the order all ranks have them.
    pub(crate) fn contents(&self, placing: &dyn Placing) -> Result<Vec<Content>, CheckpointError> {
        (0..self.entries.len()).map(|param| self.content(param, placing)).collect()
    }

    fn content(&self, param: usize, placing: &dyn Placing) -> Result<Content, CheckpointError> {
        let entry = &self.entries[param];
        let (name, t) = (entry.param.name().to_owned(), entry.t);
        let holding = placing.holding(&entry.param);
        if holding.local != shape(&entry.param) {
            let reason = format!("its holding is of {:?}, not {:?}", holding.local, entry.param.shape());
            return Err(CheckpointError::Contradiction { what: format!("parameter {name:?}"), reason });
        }
        let named = |slot, name: &str, dtype: DType| match Type::of(dtype) {
            Some(dtype) => Ok(Named { slot, name: name.to_owned(), dtype }),
            None => Err(CheckpointError::memory(format!("{dtype} is not saved"))),
        };
        let mut vectors = vec![named(Slot::Params, PARAM, entry.param.dtype())?];
        let Place::Bucket { bucket, range, .. } = &entry.place else {
            return Ok(Content { name, t, holding, owned: 0..entry.param.len(), vectors });
        };
        let owned = &self.buckets[*bucket];
        if let Some(master) = owned.master() {
            let name = if master.dtype() == DType::U16 { REMAINDER } else { MASTER };
            vectors.push(named(Slot::Master, name, master.dtype())?);
        }
        for (i, (state, of)) in self.groups[entry.group].rule.state().iter().zip(owned.state()).enumerate() {
            vectors.push(named(Slot::State(i), state, of.dtype())?);
        }
        let owned = owned.part_of(range).map_or(0..0, |(within, ..)| within);
        Ok(Content { name, t, holding, owned, vectors })
    }

    /// Which elements this rank has of a vector, in what it holds of the parameter.
    pub(crate) fn has(&mut self, param: usize, slot: Slot) -> Result<Range<usize>, Error> {
        let (first, values) = self.piece(&Item { param, slot, group: None })?;
        Ok(first..first + values.len())
    }

    /// The same memory, to be written.
    pub(crate) fn vector_mut(&mut self, param: usize, slot: Slot) -> Result<SliceMut<'_>, Error> {
        self.piece_mut(&Item { param, slot, group: None })
    }
}
